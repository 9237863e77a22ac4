"""An engine of a package outside the repository keeps the guarantees of the interface, with a real server and gloo."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from letters import write_letters
from safetensors.torch import save_file

from rljob.api.roles import Rollout
from rljob.rollout.adapters.load_adapter import load_adapter
from rljob.rollout.conformance import CHECKS, a_dead_server_is_gone
from rljob.rollout.engine_under_test import EngineUnderTest
from rljob.rollout.supervisor import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCABULARY, WIDTH, LENGTH = 64, 16, 1024


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The engine's package, outside the repository, on the path of this process and of servers."""
    path = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).with_name("torch_engine"), path / "torch_engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        patch.setenv("PYTHONPATH", str(path))
        yield path
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_engine"]:
        del sys.modules[name]


def adapter_of(model, **pool):
    pools = [Rollout(name="main", engine="torch_engine.adapter:TorchEngine", max_model_length=LENGTH, **pool)]
    return load_adapter(SimpleNamespace(rollouts=pools), 0, model)


@pytest.fixture(scope="module")
async def running(package, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tensors = {name: 0.5 * torch.randn(VOCABULARY, WIDTH) for name in ("embedding", "output")}
    save_file(tensors, model / "model.safetensors")
    tokenizer = write_letters(model, VOCABULARY)
    adapter = adapter_of(model)
    process = await EngineProcess.start(adapter)
    await process.wait_healthy()
    engine = EngineUnderTest(process.client, adapter.in_flight, [*tensors.items()], VOCABULARY, LENGTH, 500)
    engine.tokenizer = tokenizer
    await engine.update()
    yield process, engine
    engine.close()
    await process.kill()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_interface(running, check):
    await check(running[1])


async def test_a_server_that_ends(running):
    process, engine = running
    await a_dead_server_is_gone(engine, lambda: process._process.kill())
