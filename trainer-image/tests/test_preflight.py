"""Problems of a model's directory or a machine are reported without importing torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rljob.protocol.environment import ComponentEnvironment
from rljob.trainer import model_directory, preflight
from rljob.trainer.backends.megatron import supported_layouts


@pytest.fixture
def model(tmp_path: Path, model_directory: Path) -> Path:
    """A copy of the model that the test modifies."""
    return Path(shutil.copytree(model_directory, tmp_path / "model"))


def edit(**values):
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without(name: str):
    def change(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        save_file({key: value for key, value in tensors.items() if name not in key}, model / "model.safetensors")

    return change


def index(weight_map: object):
    def change(model: Path) -> None:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


BROKEN = {
    "no directory": (shutil.rmtree, "holds no Hugging Face model (config.json is missing)"),
    "no config": (
        lambda model: (model / "config.json").unlink(),
        "holds no Hugging Face model (config.json is missing)",
    ),
    "config not JSON": (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
    "config a list": (lambda model: (model / "config.json").write_text("[]"), "it is not a JSON object"),
    "unknown kind": (edit(model_type="qwen99"), "model_type 'qwen99' is not a causal language model"),
    "no kind": (edit(model_type=None), "model_type None is not a causal language model"),
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(),
        "holds no weights (model.safetensors is missing)",
    ),
    "weights cut off": (cut, "model.safetensors is truncated or not a safetensors file"),
    "weights empty": (lambda model: (model / "model.safetensors").write_bytes(b""), "model.safetensors is truncated"),
    "a file of several missing": (index({"w": "model-00001.safetensors"}), "model-00001.safetensors is missing"),
    "a broken index": (index([]), "model.safetensors.index.json cannot be read"),
    "another vocabulary": (edit(vocab_size=99), "embed_tokens.weight is [61, 32] where config.json says [99, 32]"),
    "another width": (edit(hidden_size=64), "embed_tokens.weight is [61, 32] where config.json says [61, 64]"),
    "fewer layers": (without("layers.1."), "there are weights of 1 layers where config.json says 2"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_named(model, case):
    change, sentence = BROKEN[case]
    change(model)
    found = list(model_directory.problems(model))
    assert len(found) == 1 and sentence in found[0] and "\n" not in found[0]


def test_a_good_model_has_no_problems(model):
    assert list(model_directory.problems(model)) == []
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index({"a": "model-1.safetensors", "b": "model-1.safetensors"})(model)
    assert list(model_directory.problems(model)) == []
    (model / "pytorch_model.bin").touch()  # not checked
    assert list(model_directory.problems(model)) == []


def test_the_kinds_are_those_that_transformers_knows():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert model_directory.known_kinds() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check(job, storage="/nowhere"):
    return list(preflight.check(ComponentEnvironment(job, Path(storage), "", "", "", "", "")))


def test_nccl_needs_gpus_for_all_roles(job):
    nccl = {"weightSync": {"transport": "nccl"}}
    sentence = "spec.weightSync.transport: nccl needs NVIDIA GPUs and {} runs on CPU; set auto or gloo"
    assert check(job(**nccl)) == [sentence.format("the trainer")]
    on_gpu = {"accelerator": {"kind": "nvidia"}}
    assert check(job(**nccl, trainer=on_gpu)) == [sentence.format("pool main")]
    assert check(job(**nccl, trainer=on_gpu, rollouts=[{"name": "main", **on_gpu}])) == []


def test_a_model_that_the_initializer_makes_is_not_checked(job, tmp_path):
    later = job(models=[{"name": "policy", "source": "job://model"}])
    assert check(later, tmp_path) == []
    (tmp_path / "model").mkdir()
    assert check(later, tmp_path)[0].startswith("spec.models[0].source: ")


def test_targets_of_adapters_that_the_model_lacks_are_named(job, model):
    def found(*targets: str) -> list[str]:
        lora = {"targets": list(targets)}
        return check(job(models=[{"name": "policy", "source": str(model)}], trainer={"lora": lora}))

    assert found("q_proj", "self_attn.o_proj", "model.layers.0.mlp.down_proj") == []
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert found("q_proj", "nonsense", "lm_head") == [
        f"spec.trainer.lora.targets[{i}]: {model} has no layer {target}; choose from {known}"
        for i, target in ((1, "nonsense"), (2, "lm_head"))
    ]
    edit(model_type="gemma3_text")(model)  # its layers are not known before it is loaded
    assert not any("targets" in problem for problem in found("nonsense"))


def test_a_reference_model_is_checked_too(job, tmp_path, model):
    models = [{"name": "policy", "source": str(model)}, {"name": "other", "source": str(tmp_path / "other")}]
    named = {"algorithm": {"klCoefficient": 1, "referenceModel": "other"}, "models": models}
    (problem,) = check(job(**named))
    assert problem.startswith("spec.models[1].source: ") and "holds no Hugging Face model" in problem


MINE = """
from rljob.trainer.algorithms.advantages.base import per_group
from rljob.trainer.algorithms.needs import requires

good = per_group(lambda rewards_G: rewards_G)
number = 3

@requires(reference=True)
def distilled(inputs): ...

@requires(values=True)
def criticized(inputs): ...
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "my_algorithms.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.syspath_prepend(tmp_path / "packages")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"algorithm": {"advantage": "absent_package:f"}}, "spec.algorithm.advantage: module absent_package cannot be"),
        ({"algorithm": {"objective": "my_algorithms:absent"}}, "spec.algorithm.objective: module my_algorithms has no"),
        ({"algorithm": {"aggregation": "my_algorithms:number"}}, "spec.algorithm.aggregation: my_algorithms:number is"),
        (
            {"algorithm": {"advantage": "my_algorithms:distilled"}},
            "spec.algorithm.advantage: my_algorithms:distilled needs the reference model; name it in spec.algorithm.r",
        ),
        (
            {"algorithm": {"advantage": "my_algorithms:criticized"}},
            "spec.algorithm.advantage: my_algorithms:criticized needs a critic; name the model that it starts from in",
        ),
        (
            {"algorithm": {"objective": "my_algorithms:criticized"}},
            "spec.algorithm.objective: my_algorithms:criticized needs values of a critic, which only an advantage gets",
        ),
        (
            {"algorithm": {"klCoefficient": 1, "klEstimator": "my_algorithms:absent"}},
            "spec.algorithm.klEstimator: module my_algorithms has no",
        ),
        (
            {"trainer": {"backend": "my_algorithms:Absent"}},
            "spec.trainer.backend: module my_algorithms has no attribute",
        ),
    ],
)
def test_a_reference_that_cannot_be_used_is_named(job, mine, spec, sentence):
    assert check(job(algorithm={"advantage": "my_algorithms:good"})) == []
    assert check(job(algorithm={"advantage": "my_algorithms:distilled", "referenceModel": "policy"})) == []
    assert check(job(algorithm={"advantage": "my_algorithms:criticized", "criticModel": "policy"})) == []
    (problem,) = check(job(**spec))
    assert sentence in problem


def test_a_function_may_need_a_reference_of_a_pool(job, mine):
    made = job(
        algorithm={"advantage": "my_algorithms:distilled", "referencePool": "big"},
        models=[{"name": "policy", "source": "job://model"}, {"name": "other", "source": "job://other"}],
        rollouts=[{"name": "main", "maxModelLength": 512}, {"name": "big", "model": "other", "maxModelLength": 513}],
    )
    assert not any("reference" in problem for problem in check(made))


def run_check(job, tmp_path, source: Path, **spec: object) -> subprocess.CompletedProcess[str]:
    made = job(models=[{"name": "policy", "source": str(source)}], **spec)
    (tmp_path / "job.json").write_text(made.model_dump_json(by_alias=True))
    environment = os.environ | {"RLJOB_JOB": str(tmp_path / "job.json"), "RLJOB_STORAGE": str(tmp_path / "storage")}
    program = "import sys; from rljob.trainer.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, "--check"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_check_prints_sentences_and_exits_2_without_importing_torch(job, tmp_path, model, mine):
    done = run_check(job, tmp_path, model, algorithm={"advantage": "my_algorithms:good"})
    assert (done.returncode, done.stderr) == (0, "")
    done = run_check(job, tmp_path, model, algorithm={"advantage": "my_algorithms:absent"})
    assert done.returncode == 2 and done.stderr.startswith("spec.algorithm.advantage: module my_algorithms has no")
    cut(model)
    done = run_check(job, tmp_path, model)
    assert done.returncode == 2
    assert done.stderr.startswith(f"spec.models[0].source: {model}/model.safetensors is truncated")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "storage").exists()


def test_megatron_is_refused_beside_a_package_that_replaces_its_optimizer(tmp_path, monkeypatch):
    (tmp_path / "apex.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert list(supported_layouts.library_problems()) == [
        "spec.trainer.backend: megatron does not work beside apex, which would replace its optimizer; use an image "
        "without apex, or set fsdp"
    ]
