"""Memory of the machine that the trainer's processes need: on GPUs the copies on the host, on a CPU the whole plan."""

import json
from pathlib import Path

import pytest

from rljob.api.load import load, validate
from rljob.api.memory_checks import describe_plan
from rljob.api.model_shape import read_shape
from rljob.api.resolve import resolve
from rljob.local import capacity
from rljob.local.errors import CliError
from rljob.local.memory_needs import Sizes, memory_needs
from rljob.protocol.gpus import Gpu

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
GIB = 1 << 30
QWEN = {"model_type": "qwen2", "vocab_size": 152_064}
CONFIGS = {
    "tiny": QWEN | {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "213M": QWEN | {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 14},
    "1.5B": QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    "7B": QWEN | {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28},
    "32B": QWEN | {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64},
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
OFFLOAD = {"recompute": "layer", "optimizer": {"offload": True}}


def shape(name):
    found = read_shape(CONFIGS[name] | HEADS)
    assert found is not None
    return found


@pytest.fixture
def job(manifest):
    """Function that resolves the manifest with settings of its trainer, and a longest sample."""

    def make(device="nvidia", length=4096, **trainer):
        manifest["spec"] |= {"trainer": trainer, "rollouts": [{"name": "main", "maxModelLength": length}]}
        return resolve(validate(manifest), device)

    return make


def trainer_of(job, name, total, others=None):
    """Return the need of the trainer."""
    known = {"policy": shape(name), **(others or {})}
    return memory_needs(job, "spec.models[0].source", Sizes({"policy": shape(name).parameters}, 0, 0, known), total)[0]


def test_the_host_of_gpus_holds_the_copies_of_all_processes(job):
    seven, thirty_two = shape("7B").parameters, shape("32B").parameters
    assert trainer_of(job(**OFFLOAD), "7B", GIB).size == 30 * seven
    assert trainer_of(job(processesPerNode=12, recompute="layer"), "32B", GIB).size == 14 * thirty_two
    other = job(backend="acme.trainer:Backend")
    assert memory_needs(other, "source", Sizes({"policy": 1000}, shapes={"policy": shape("7B")}), GIB) == []
    assert memory_needs(job(), "source", Sizes({"policy": 1000}), GIB) == []


def test_the_remedy_for_the_host_is_one_that_fits(job):
    def advice(total, **trainer):
        return trainer_of(job(**trainer), "7B", total * GIB).advice

    more = (
        "set spec.trainer.optimizer.offload: false, with more GPUs (spec.trainer.processesPerNode) if they are needed"
    )
    assert advice(128, **OFFLOAD) == more
    assert advice(64, **OFFLOAD) == "train adapters (spec.trainer.lora, spec.trainer.optimizer.offload: false)"
    assert advice(64, processesPerNode=4) == "train adapters (spec.trainer.lora)"
    assert advice(8) == "choose a smaller model in spec.models[0].source, or use a machine with more memory"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Function that sets the memory of this machine, and a model in the storage of a run, which it returns."""

    def make(name, total, available):
        monkeypatch.setattr(capacity, "_memory", lambda: (int(total * GIB), int(available * GIB)))
        monkeypatch.setattr(capacity, "_check_disk", lambda *_: None)
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS[name] | HEADS))
        return tmp_path

    return make


def test_a_trainer_on_gpus_without_memory_on_the_host_is_refused(job, machine):
    gpus = tuple(Gpu(str(i), i, "", 80 * GIB) for i in range(3))
    with pytest.raises(CliError) as refused:
        capacity.check(job(**OFFLOAD), machine("7B", 23, 20), gpus)
    assert refused.value.exit_code == 2
    (line,) = str(refused.value).splitlines()
    assert line.startswith(
        "the job needs 220.0 GiB of memory at least, 220.0 GiB of it for the trainer's weights for the "
    )
    assert line.endswith(
        " and this machine has 23.0 GiB; choose a smaller model in spec.models[0].source, or use a machine with more "
        "memory"
    )
    # What fits neither the GPU nor the host has two sentences, and no remedy of one leads to the other.
    with pytest.raises(CliError) as refused:
        capacity.check(job(), machine("7B", 23, 20), gpus)
    of_gpu, of_host = str(refused.value).splitlines()
    assert of_gpu.startswith("spec.trainer.processesPerNode: the phase step") and "offload" not in of_gpu
    assert of_host.startswith("the job needs 102.6 GiB of memory at least")
    assert capacity.check(job(**OFFLOAD), machine("7B", 256, 256), gpus) == []
    (warning,) = capacity.check(job(**OFFLOAD), machine("7B", 256, 128), gpus)
    assert " of memory at least, " in warning and warning.endswith(" if they are needed, or end other programs")


def test_a_trainer_on_cpu_is_checked_with_the_plan_that_explain_prints(job, machine):
    with pytest.raises(CliError, match=r"up to 16384 tokens, and this machine has 23\.0 GiB; lower") as refused:
        capacity.check(job("cpu"), machine("213M", 23, 20))
    tokens = int(str(refused.value).rpartition(" to ")[2])
    assert 8192 < tokens < 16_384
    found = job("cpu", microbatchTokens=tokens)
    assert capacity.check(found, machine("213M", 23, 23)) == []
    (step,) = [line for line in describe_plan(found.spec, {"policy": shape("213M")}, 0) if "step" in line]
    assert 20 < float(step.split()[1]) < 23
    # The plan may exceed what the trainer will hold: only what it holds at least is refused.
    (warning,) = capacity.check(job("cpu"), machine("213M", 25, 25))
    assert " of memory at most, " in warning and "; lower spec.trainer.microbatchTokens to " in warning


def test_the_remedy_for_a_cpu_is_one_that_fits(job):
    def advice(total, length=4096, **trainer):
        return trainer_of(job("cpu", length, **trainer), "213M", int(total * GIB)).advice

    assert advice(20, microbatchTokens=65_536).startswith("lower spec.trainer.microbatchTokens to ")
    assert advice(12.5) == "set spec.trainer.recompute: layer"
    assert advice(12.5, microbatchTokens=32_768).startswith(
        "set spec.trainer.recompute: layer and lower spec.trainer.microbatchTokens to "
    )
    both = "lower spec.rollouts[0].maxModelLength and spec.trainer.microbatchTokens to "
    assert advice(12, 262_144).startswith(f"set spec.trainer.recompute: layer and {both}")
    assert advice(12, 262_144, recompute="layer").startswith(both)
    assert advice(4) == "choose a smaller model in spec.models[0].source"


def test_a_small_batch_needs_less_than_the_largest_microbatch(job, manifest):
    manifest["spec"]["training"] |= {"promptsPerStep": 2, "samplesPerPrompt": 2}
    assert "microbatches of up to 2048 tokens" in trainer_of(job("cpu", 512), "213M", GIB).what


def test_processes_on_cpu_hold_their_plans_together(job):
    one, four = trainer_of(job("cpu"), "213M", GIB), trainer_of(job("cpu", processesPerNode=4), "213M", GIB)
    activations = one.most - 32 * shape("213M").parameters
    assert four.most - one.most > 2.5 * activations, "every process has a microbatch"


def test_other_models_on_cpu_are_estimated(job, manifest):
    found = job("cpu")
    assert memory_needs(found, "source", Sizes({"policy": 1000}), GIB)[0].size == 28_000
    manifest["spec"]["algorithm"] = {"preset": "ppo", "criticModel": "big"}
    manifest["spec"]["models"].append({"name": "big", "source": "job://big"})
    policy, *_ = memory_needs(job("cpu"), "source", Sizes({"policy": 1000}, shapes={"policy": shape("213M")}), GIB)
    assert policy.size == 28_000
    big = {"policy": shape("213M"), "big": shape("213M")}
    alone = trainer_of(found, "213M", GIB)
    assert trainer_of(job("cpu"), "213M", GIB, big).size > alone.size + 22 * 197_978_113


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_need_less_than_8_gib(path):
    job = resolve(load(str(path), []), "cpu")
    parameters = {pool.model: 500_000_000 for pool in job.spec.frozen_pools} | {"policy": shape("tiny").parameters}
    needs = memory_needs(job, "source", Sizes(parameters, shapes={"policy": shape("tiny")}), 8 * GIB)
    assert needs[0].what.startswith("the trainer with")
    assert sum(need.most for need in needs) < 4 * GIB
