"""A real vLLM engine whose two workers Ray starts on two hosts, behind the agent, with weights from a trainer.

Both hosts are this machine: Ray itself runs twice, with the token. vLLM's CPU build has no name for its devices in Ray,
so a hook gives it that of GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys

import pytest
from served_engine import LONGEST, Trainer, agent_environment, running

from rljob.transfer.weight_group import address_towards

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

ANYWHERE = "198.51.100.1"
HOOK = """
import importlib.abc, importlib.util, sys

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        plain = spec.loader.exec_module
        def exec_module(module):
            plain(module)
            module.CpuPlatform.ray_device_key = "GPU"
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""
RAY = "--num-cpus=1 --num-gpus=1 --object-store-memory=100000000 --metrics-export-port=8081 --block"


@pytest.fixture(scope="module")
async def run(tmp_path_factory, make_coordinator, manifest):
    try:
        host = address_towards(ANYWHERE)
    except OSError:
        pytest.skip("this machine has no address besides loopback")
    path = tmp_path_factory.mktemp("hosts")
    (path / "sitecustomize.py").write_text(HOOK)
    (path / "ray-token").write_text(secrets.token_urlsafe(32))
    given = {
        "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]),
        "RLJOB_HOST": host,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(path / "ray-token"),
        "RAY_ADDRESS": f"{host}:6379",
    }
    head = f"ray start --head --port=6379 --include-dashboard=false --dashboard-host=127.0.0.1 {RAY}"
    parallelism = {"tensor": 2}
    text = manifest("job://model", maxModelLength=LONGEST, hosts=2, parallelism=parallelism, kvCacheBytes=64 << 20)
    trainer = Trainer(path / "model", workers=2)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**given, "KUBERAY_GEN_RAY_START_CMD": head}.items():
            patch.setenv(name, value)
        worker = f"ray start --address={host}:6379 {RAY}"
        environment = agent_environment(path, "", text) | {"KUBERAY_GEN_RAY_START_CMD": worker}
        log = stack.enter_context((path / "worker.log").open("w"))
        command = ["sh", "-c", f'sleep 20; exec "{sys.executable}" -m rljob.rollout.main --worker']
        other = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            async with running(path, make_coordinator(), trainer, text) as run:
                yield run
        finally:
            other.terminate()
            other.wait(60)
            sys.stderr.write((path / "worker.log").read_text()[-5000:])


async def test_the_workers_on_both_hosts_receive_each_update_and_generate(run):
    for _ in range(2):
        await run.update_and_generate(3)


async def test_the_server_listens_on_loopback_and_its_workers_belong_to_ray(run):
    server = run.server()
    assert "--distributed-executor-backend" in server.cmdline()
    listening = [each for each in server.net_connections() if each.status == "LISTEN"]
    port = int(server.cmdline()[server.cmdline().index("--port") + 1])
    assert {each.laddr.ip for each in listening if each.laddr.port == port} == {"127.0.0.1"}
    assert not [each for each in server.children(recursive=True) if each.name().startswith("VLLM::Worker")]
