"""`rljob run` assigns GPUs to trainer and engines, or refuses the job."""

import pytest

from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.cli import manifest as manifest_commands
from rljob.local import capacity, commands, field_support, gpu_assignment, job_checks
from rljob.local.commands import LocalContext
from rljob.local.errors import CliError
from rljob.local.run_directory import ROLES
from rljob.protocol import gpus as gpus_of_machine
from rljob.protocol.gpus import Gpu


def machine(count):
    return tuple(Gpu(str(i), i, f"GPU-{i}", 80 << 30, "NVIDIA H100") for i in range(count))


def own(value):
    return {"spec": {"containers": [{"name": "main", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": value}]}]}}


@pytest.fixture
def job(manifest):
    """Function that resolves the manifest with two pools and changes of its spec, on a machine with GPUs."""

    def make(**changes):
        manifest["spec"]["trainer"] = {"processesPerNode": 2}
        manifest["spec"]["rollouts"] = [{"name": "main", "replicas": {"min": 2}}, {"name": "other"}]
        manifest["spec"] |= changes
        return resolve(validate(manifest), "nvidia")

    return make


def devices(job, gpus, tmp_path):
    here = LocalContext(tmp_path, dict.fromkeys(commands.servers(job), 1), dict.fromkeys(ROLES, ""), gpus)
    return {
        component.name: component.environment["CUDA_VISIBLE_DEVICES"]
        for component in commands.components(job, here)
        if "CUDA_VISIBLE_DEVICES" in component.environment
    }


def test_the_trainer_gets_the_first_gpus_and_each_engine_its_own(job, tmp_path):
    found = devices(job(), machine(6), tmp_path)
    assert found == {"trainer": "0,1", "rollout-main-0": "2", "rollout-main-1": "3", "rollout-other-0": "4"}
    gpus = tuple(Gpu(f"GPU-{i}", i) for i in (7, 5, 1, 3, 2))
    assert devices(job(), gpus, tmp_path)["trainer"] == "GPU-7,GPU-5"
    assert field_support.errors(job(), gpus) == []


def test_every_worker_of_an_engine_gets_a_gpu(job, tmp_path):
    sizes = {"tensor": 2, "pipeline": 1, "data": 2}
    pools = [{"name": "main", "replicas": {"min": 2}, "parallelism": sizes}, {"name": "other"}]
    found = job(rollouts=pools)
    assert devices(found, machine(11), tmp_path) == {
        "trainer": "0,1",
        "rollout-main-0": "2,3,4,5",
        "rollout-main-1": "6,7,8,9",
        "rollout-other-0": "10",
    }
    assert "rollout-main-0 2,3,4,5; " in gpu_assignment.describe(gpu_assignment.assign(found, machine(11)))
    assert field_support.errors(found, machine(11)) == []
    (problem,) = field_support.errors(found, machine(10))
    assert problem.startswith(
        "spec.trainer.processesPerNode, spec.rollouts[0].parallelism, spec.rollouts[1].replicas.min: the job needs 11 "
        "GPUs (2 for the trainer, 8 for pool main (2 engines of 4), 1 for pool other) and this machine has 10; lower "
    )
    assert field_support.errors(job(rollouts=[{**pools[0], "template": own("3,4,5")}]), machine(8)) == [
        "spec.rollouts[0].template: CUDA_VISIBLE_DEVICES names 3 GPUs and pool main needs 4; name more, or remove it"
    ]


def test_a_role_on_the_cpu_sees_no_gpu(job, tmp_path):
    mixed = job(trainer={"accelerator": {"kind": "cpu"}, "processesPerNode": 4})
    assert mixed.spec.weight_sync.transport == "gloo"
    assert devices(mixed, machine(3), tmp_path) == {
        "trainer": "",
        "rollout-main-0": "0",
        "rollout-main-1": "1",
        "rollout-other-0": "2",
    }
    assert field_support.errors(mixed, machine(3)) == []


def test_the_gpus_that_a_template_names_are_its_roles_own(job, tmp_path):
    pools = [{"name": "main", "replicas": {"min": 2}, "template": own("0,3")}, {"name": "other"}]
    found = job(rollouts=pools)
    assert devices(found, machine(5), tmp_path) == {
        "rollout-main-0": "0,3",
        "rollout-main-1": "0,3",
        "trainer": "1,2",
        "rollout-other-0": "4",
    }
    assert field_support.errors(found, machine(5)) == []
    assert field_support.errors(found, machine(4)) == [
        "spec.trainer.processesPerNode, spec.rollouts[1].replicas.min: the job needs 3 GPUs (2 for the trainer, 1 for "
        "pool other) and this machine has 2 besides those that templates name in CUDA_VISIBLE_DEVICES; lower one of "
        "them, make more GPUs visible (CUDA_VISIBLE_DEVICES), or set accelerator.kind: cpu for a role"
    ]
    assert field_support.errors(
        job(rollouts=pools, trainer={"processesPerNode": 2, "template": own("1")}), machine(5)
    ) == ["spec.trainer.template: CUDA_VISIBLE_DEVICES names 1 GPU and the trainer needs 2; name more, or remove it"]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("99", "'99', which is none of the GPUs 0, 1"),
        ("0,0", "'0', a GPU that it names before"),
        ("1,GPU-1", "'GPU-1', a GPU that it names before"),
        ("GPU-7,0", "'GPU-7', which is none of the GPUs 0, 1"),
    ],
)
def test_a_template_that_names_an_unknown_gpu_or_one_twice_is_refused(job, value, wrong):
    found = job(
        trainer={"processesPerNode": 2, "template": own(value)}, rollouts=[{"name": "main", "template": own("0")}]
    )
    assert field_support.errors(found, machine(2)) == [
        f"spec.trainer.template: CUDA_VISIBLE_DEVICES names {wrong}; name each GPU that it needs once, or remove it"
    ]


def test_the_memory_of_gpus_that_templates_name_is_checked(job):
    gpus = tuple(Gpu(str(i), i, f"GPU-{i}", (80 - 8 * i) << 30) for i in range(4))
    pools = [{"name": "main", "template": own("GPU-3,0")}, {"name": "other"}]
    found = job(trainer={"processesPerNode": 2, "template": own("0,2,3")}, rollouts=pools)
    assert gpu_assignment.memory_by_role(found, gpus) == (64 << 30, 56 << 30)
    assert gpu_assignment.memory_by_role(job(), gpus[:2] + machine(6)[2:]) == (72 << 30, 80 << 30)
    mig = job(trainer={"template": own("MIG-5f")}, rollouts=[{"name": "main", "template": own("MIG-6f")}])
    assert gpu_assignment.memory_by_role(mig, gpus) == (0, 0)
    on_cpu = job(trainer={"accelerator": {"kind": "cpu"}}, rollouts=[{"name": "main", "accelerator": {"kind": "cpu"}}])
    assert gpu_assignment.memory_by_role(on_cpu, gpus) == (0, 0)


def test_a_trainer_that_does_not_fit_the_gpu_of_its_template_is_refused(job, tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "_memory", lambda: (1 << 50, 1 << 50))
    monkeypatch.setattr(capacity, "_check_disk", lambda *_: None)
    config = {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944}
    heads = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(commands.json.dumps(config | heads))
    found = job(trainer={"template": own("0")}, rollouts=[{"name": "main", "template": own("0")}])
    with pytest.raises(CliError, match=r"spec\.trainer\.processesPerNode: the phase step .* needs 155\.5 GiB on a GPU"):
        capacity.check(found, tmp_path, machine(1))
    assert "; 90%" not in capacity.memory_plan(found, tmp_path, machine(1))[0]
    alone = job(trainer={"template": own("0")}, rollouts=[{"name": "main"}])
    assert "; 90% of 80.0 GiB can be used" in capacity.memory_plan(alone, tmp_path, machine(2))[0]


def test_too_few_gpus_are_refused_with_numbers(job, manifest):
    (problem,) = field_support.errors(job(), machine(4))
    assert problem.startswith(
        "spec.trainer.processesPerNode, spec.rollouts[0].replicas.min, spec.rollouts[1].replicas.min: the job needs 5 "
        "GPUs (2 for the trainer, 2 for pool main, 1 for pool other) and this machine has 4; lower one of them, "
    )
    sentence = "accelerator.kind: this machine has no NVIDIA GPU; set auto (use what exists) or cpu"
    fields = ("spec.trainer", "spec.rollouts[0]", "spec.rollouts[1]")
    assert field_support.errors(job(), ()) == [f"{field}.{sentence}" for field in fields]
    assert field_support.errors(resolve(validate(manifest)), ()) == []


def test_a_machine_without_gpus_runs_everything_on_cpu(manifest, tmp_path):
    found = resolve(validate(manifest), gpu_assignment.kind_of(()))
    assert {found.spec.trainer.accelerator.kind, *(pool.accelerator.kind for pool in found.spec.rollouts)} == {"cpu"}
    assert found.spec.weight_sync.transport == "gloo"
    assert set(devices(found, (), tmp_path).values()) == {""}
    assert gpu_assignment.describe(gpu_assignment.assign(found, ())) == ""


def test_engines_that_differ_in_their_gpu_only_are_checked_once(job, tmp_path):
    checks = list(job_checks._planned_checks(job(), tmp_path, machine(5)))
    assert [component for component, _ in checks] == ["trainer", "rollout", "runner"]
    assert [checks[i][1]["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["0,1", "2"]
    assert all(environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for _, environment in checks)


def test_explain_shows_the_assignment_and_the_meaning_of_auto(manifest, tmp_path, rljob, monkeypatch):
    path = tmp_path / "job.yaml"
    path.write_text(commands.json.dumps(manifest))
    monkeypatch.setattr(manifest_commands, "find_gpus", lambda: machine(2))
    code, text, _ = rljob("explain", path)
    assert code == 0
    assert text.endswith("# GPUs: trainer 0; rollout-main-0 1 (NVIDIA H100)\n")
    assert text.count("kind: nvidia") == 2 and "transport: nccl" in text
    assert "GPUs:" not in rljob("explain", "--cpu", path)[1]
    manifest["spec"] |= {"trainer": {"template": own("1")}, "rollouts": [{"name": "main", "template": own("1")}]}
    path.write_text(commands.json.dumps(manifest))
    assert rljob("explain", path)[1].endswith("# GPUs: trainer 1; rollout-main-0 1 (NVIDIA H100)\n")
    monkeypatch.setattr(manifest_commands, "find_gpus", lambda: ())
    assert rljob("explain", path)[1].count("kind: cpu") == 2
    assert rljob("explain", "--gpu", path)[1].count("kind: nvidia") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    monkeypatch.setattr(gpus_of_machine, "installed_gpus", lambda: machine(4))
    note = "CUDA_VISIBLE_DEVICES='9' selects none of the 4 GPUs of this machine, so none is used"
    assert f"# {note}\n" in rljob("explain", path)[1]
    monkeypatch.setattr(job_checks, "find_gpus", lambda: ())
    assert note in rljob("validate", path)[2]
