"""Fields for clusters on one machine: applied, without effect (a warning), or an error."""

import sys

import pytest

from rljob.api.field_metadata import manifest_fields, outermost
from rljob.api.load import validate
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.local import commands, field_support
from rljob.local.commands import LocalContext

POD = {"spec": {"containers": [{"name": "main", "image": "mine:1"}]}}
LAKE = {"name": "lake", "builtin": "frozen_lake"}

EXAMPLES = {
    "storage.size": ("storage", {"size": "10Gi"}),
    "storage.retention": ("storage", {"retention": "Delete"}),
    "storage.className": ("storage", {"className": "fast"}),
    "storage.accessModes": ("storage", {"accessModes": ["ReadWriteOnce"]}),
    "storage.ledger": ("storage", {"ledger": {}}),
    "storage.claim": ("storage", {"claim": "mine"}),
    "scheduling.gang.provider": ("scheduling", {"gang": {"provider": "none"}}),
    "scheduling.gang.queue": ("scheduling", {"gang": {"provider": "kueue", "queue": "research"}}),
    "scheduling.priorityClassName": ("scheduling", {"priorityClassName": "high"}),
    "scheduling.topology": ("scheduling", {"topology": {"key": "rack"}}),
    "rewards[].replicas.min": ("rewards", [{"name": "exact", "builtin": "reasoning_gym", "replicas": {"min": 2}}]),
    "rewards[].replicas.max": ("rewards", [{"name": "exact", "builtin": "reasoning_gym", "replicas": {"max": 2}}]),
    "rewards[].egress": ("rewards", [{"name": "exact", "builtin": "reasoning_gym", "egress": {"policy": "Listed"}}]),
    "environments[].egress": ("environments", [{**LAKE, "egress": {"policy": "Listed"}}]),
    "environments[].replicas.min": ("environments", [{**LAKE, "replicas": {"min": 2}}]),
    "environments[].replicas.max": ("environments", [{**LAKE, "replicas": {"max": 2}}]),
    "rollouts[].replicas.max": ("rollouts", [{"name": "main", "replicas": {"max": 2}}]),
    "runner.replicas.max": ("runner", {"replicas": {"max": 2}}),
    "trainer.sharedMemory": ("trainer", {"sharedMemory": "1Gi"}),
    "trainer.rdma": ("trainer", {"rdma": {"resource": "rdma/hca"}}),
    "trainer.hostNetwork": ("trainer", {"hostNetwork": True}),
    "rollouts[].sharedMemory": ("rollouts", [{"name": "main", "sharedMemory": "1Gi"}]),
    "rollouts[].rdma": ("rollouts", [{"name": "main", "rdma": {"resource": "rdma/hca"}}]),
    "rollouts[].hostNetwork": ("rollouts", [{"name": "main", "hostNetwork": True}]),
    "network.policy": ("network", {"policy": "Disabled"}),
    "network.allowFrom": ("network", {"allowFrom": [{"name": "a"}]}),
    "network.egress.policy": ("network", {"egress": {"policy": "Listed"}}),
    "network.egress.to": ("network", {"egress": {"policy": "Listed", "to": [{"name": "a", "cidr": "10.0.0.0/8"}]}}),
    "network.nodes": ("network", {"nodes": [{"name": "a", "cidr": "10.0.0.0/8"}]}),
    "failurePolicy.disruption": ("failurePolicy", {"disruption": "Block"}),
    "failurePolicy.pendingSeconds": ("failurePolicy", {"pendingSeconds": 60}),
    "ttlSecondsAfterFinished": ("ttlSecondsAfterFinished", 60),
    "keepCoordinatorSeconds": ("keepCoordinatorSeconds", 0),
    "managedBy": ("managedBy", "example.com/other"),
    "downloads.claim": ("downloads", {"claim": "models"}),
    "downloads.emptyDir": ("downloads", {"emptyDir": True}),
    "downloads.secret": ("downloads", {"secret": "hub"}),
    "trainer.accelerator.profile": ("trainer", {"accelerator": {"profile": "h100"}}),
    "rollouts[].accelerator.profile": ("rollouts", [{"name": "main", "accelerator": {"profile": "h100"}}]),
}
KEDA = {"provider": "keda", "keda": {"serverAddress": "http://prometheus:9090", "query": "up"}}
AUTOSCALING = {
    "provider": {"provider": "none"},
    "scaleOutSeconds": {"scaleOutSeconds": 31},
    "scaleInSeconds": {"scaleInSeconds": 601},
    "targetInFlight": {"targetInFlight": 3},
    "keda.serverAddress": KEDA,
    "keda.query": KEDA,
}
for name, value in AUTOSCALING.items():
    EXAMPLES |= {
        f"rewards[].autoscaling.{name}": (
            "rewards",
            [{"name": "exact", "builtin": "reasoning_gym", "autoscaling": value}],
        ),
        f"environments[].autoscaling.{name}": ("environments", [{**LAKE, "autoscaling": value}]),
        f"runner.autoscaling.{name}": ("runner", {"autoscaling": value}),
    }
    if name != "targetInFlight":
        EXAMPLES[f"rollouts[].autoscaling.{name}"] = ("rollouts", [{"name": "main", "autoscaling": value}])

IGNORED = {
    field.path.removeprefix("spec."): field.local
    for field in outermost(manifest_fields(RLJob), lambda field: field.local)
    if not field.unsupported
}
"""Path below spec → why it has no effect on one machine."""


def components(manifest, tmp_path):
    tokens = {"agent": "a", "trainer": "t", "runner": "r", "reward": "s", "environment": "e", "owner": "o"}
    here = LocalContext(tmp_path, {"coordinator": 1, "reward-exact": 2, "environment-lake": 3}, tokens)
    return {component.name: component for component in commands.components(resolve(validate(manifest)), here)}


def test_every_ignored_field_has_an_example():
    assert EXAMPLES.keys() == IGNORED.keys() - {"metadata.namespace", "metadata.labels", "metadata.annotations"}


@pytest.mark.parametrize("path", EXAMPLES)
def test_a_field_without_effect_gives_one_warning_and_changes_no_command(manifest, tmp_path, path):
    field, value = EXAMPLES[path]
    if field == "environments":
        manifest["spec"][field] = [LAKE]
    before = components(manifest, tmp_path)
    assert field_support.warnings(validate(manifest)) == []
    manifest["spec"][field] = value
    if path.endswith("hostNetwork"):  # network policies forbid hostNetwork
        manifest["spec"]["network"] = {"policy": "Disabled"}
    lines = field_support.warnings(validate(manifest))
    expected = f"spec.{path.replace('[]', '[0]')}: has no effect here, {IGNORED[path]}"
    assert expected in lines
    with_one = path in ("network.egress.to", "scheduling.gang.queue") or path.endswith("hostNetwork")
    beside = 1 if with_one else 2 * (".keda." in path)
    assert len(lines) == 1 + beside
    assert components(manifest, tmp_path) == before


@pytest.mark.parametrize("role", ["trainer", "rollouts"])
def test_nccl_variables_are_applied_and_the_template_overrides_them(manifest, tmp_path, role):
    template = {"spec": {"containers": [{"name": "main", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}]}}
    fields = {"nccl": {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo"}, "template": template}
    manifest["spec"][role] = fields if role == "trainer" else [{"name": "main", **fields}]
    assert field_support.warnings(validate(manifest)) == []
    found = components(manifest, tmp_path)["trainer" if role == "trainer" else "rollout-main-0"].environment
    assert (found["NCCL_DEBUG"], found["GLOO_SOCKET_IFNAME"]) == ("INFO", "lo")


def test_command_and_variables_of_a_templates_main_container_are_applied(manifest, tmp_path):
    main = {
        "name": "main",
        "command": ["nice", "python"],
        "args": ["-v"],
        "env": [{"name": "HF_HOME", "value": "/x"}, {"name": "KEY", "valueFrom": {"secretKeyRef": {}}}],
    }
    manifest["spec"]["trainer"] = {"template": {"spec": {"containers": [{"name": "side"}, main]}}}
    manifest["spec"]["runner"] = {"template": {"spec": {"containers": [{"name": "main", "args": ["--fast"]}]}}}
    found = components(manifest, tmp_path)
    assert found["trainer"].arguments == ["nice", "python", "-v"]
    assert found["trainer"].environment["HF_HOME"] == "/x"
    assert "KEY" not in found["trainer"].environment
    assert found["trainer"].environment["RLJOB_TOKEN"] == "t"
    assert found["runner"].arguments == [sys.executable, "-m", "rljob.runner.main", "--fast"]
    assert field_support.warnings(validate(manifest)) == [
        "spec.trainer.template: fields of pods have no effect here: container side, KEY of main"
    ]


def test_the_initializer_has_the_variables_of_its_own_and_of_the_trainers_template(manifest, tmp_path):
    def pod(**variables):
        env = [{"name": name, "value": value} for name, value in variables.items()]
        return {"spec": {"containers": [{"name": "main", "env": env}]}}

    manifest["spec"]["trainer"] = {"template": pod(A="trainer's", B="trainer's")}
    manifest["spec"]["initializer"]["template"] = pod(B="own")
    assert field_support.warnings(validate(manifest)) == []
    found = commands.initializer(resolve(validate(manifest)), tmp_path)
    assert (found.environment["A"], found.environment["B"]) == ("trainer's", "own")
    assert found.arguments == ["make-model", f"{tmp_path}/model"]
    assert found.environment["RLJOB_SEED"] == str(manifest["spec"].get("seed", 0))


LISTS = ("rollouts", "rewards", "environments")


@pytest.mark.parametrize("role", ["trainer", "runner", "coordinator", "initializer", *LISTS])
def test_other_fields_of_a_template_are_listed_in_one_warning(manifest, role):
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {}, **POD["spec"]}}
    manifest["spec"]["environments"] = [LAKE | {}]
    if role in LISTS:
        manifest["spec"][role][0]["template"] = template
    else:
        manifest["spec"].setdefault(role, {})["template"] = template
    path = f"spec.{role}{'[0]' if role in LISTS else ''}.template"
    assert field_support.warnings(validate(manifest)) == [
        f"{path}: fields of pods have no effect here: metadata, spec.nodeSelector, image of main"
    ]


def test_as_many_runners_are_started_as_the_manifest_requests(manifest, tmp_path):
    manifest["spec"]["runner"] = {"replicas": {"min": 3}}
    found = components(manifest, tmp_path)
    assert {"runner", "runner-1", "runner-2"} <= set(found)
    assert found["runner-2"].environment == found["runner"].environment


@pytest.mark.parametrize("field", ["rewards", "environments"])
def test_a_user_container_needs_a_local_command(manifest, field):
    manifest["spec"][field] = [{"name": "exact", "template": POD}]
    (line,) = field_support.errors(resolve(validate(manifest)), ())
    assert line.startswith(f"spec.{field}[0].template: a container cannot be run on this machine; add local: {{command")
    manifest["spec"][field][0]["local"] = {"command": ["./serve"]}
    assert field_support.errors(resolve(validate(manifest)), ()) == []
    assert field_support.warnings(validate(manifest)) == [
        f"spec.{field}[0].template: has no effect here, local.command is run instead"
    ]


def test_a_suspended_job_is_not_run(manifest):
    assert field_support.errors(resolve(validate(manifest)), ()) == []
    manifest["spec"]["suspend"] = True
    assert field_support.errors(resolve(validate(manifest)), ()) == [
        "spec.suspend: the job is suspended; set suspend: false to run it"
    ]


def test_several_nodes_are_refused_on_one_machine(manifest):
    manifest["spec"]["trainer"] = {"nodes": 2}
    assert field_support.errors(resolve(validate(manifest)), ()) == [
        "spec.trainer.nodes: 2 nodes are requested, and this is one machine; set nodes: 1, and processesPerNode for "
        "more processes"
    ]


def test_an_engine_on_several_hosts_is_refused_on_one_machine(manifest):
    manifest["spec"]["rollouts"] = [{"name": "main", "hosts": 2, "parallelism": {"tensor": 16}}]
    assert field_support.errors(resolve(validate(manifest)), ()) == [
        "spec.rollouts[0].hosts: an engine on 2 hosts is requested, and this is one machine; set hosts: 1, and "
        "parallelism for the GPUs of this machine"
    ]
