"""Objects whose cause is reported only in events are found, and the events are used in conditions."""

import pytest

from rljob.operator.api_types import ObjectCondition
from rljob.operator.planning.stalled import ASK_SECONDS, STALLED_SECONDS, stalled
from rljob.operator.planning.timestamps import instant

from .world import World, put


@pytest.fixture
def world():
    made = World(rollouts=[{"name": "main"}], trainer={})
    made.run_up()
    return made


def waits_silently(world, name):
    """Schedule a pod whose containers wait without a reason."""
    world.waiting("ContainerCreating", "", name)
    [pod] = world.find(name)
    put(pod.status, phase="Pending")
    scheduled = ObjectCondition("PodScheduled", "True", last_transition_time=instant(world.now))
    put(pod.status, conditions=[scheduled, ObjectCondition("Ready", "False")])
    return pod.metadata.uid


def found(world):
    return stalled(world.pods.values(), world.children, world.now)


def test_a_pod_whose_containers_report_no_reason_is_stalled(world):
    uid = waits_silently(world, "runner")
    assert found(world) == {uid: STALLED_SECONDS}
    assert world.settle().after == STALLED_SECONDS
    world.now += STALLED_SECONDS
    assert found(world) == {uid: 0}
    assert world.settle().after == ASK_SECONDS


@pytest.mark.parametrize("reason", ["ErrImagePull", "CreateContainerConfigError", "CrashLoopBackOff"])
def test_a_pod_that_reports_a_reason_is_not_stalled(world, reason):
    waits_silently(world, "runner")
    world.waiting(reason, "why", "runner")
    assert found(world) == {}


def test_a_running_job_has_no_stalled_objects(world):
    assert found(world) == {}
    assert world.settle().after is None


def test_a_job_without_pods_is_stalled_until_it_has_pods_or_has_ended():
    world = World()
    world.settle()
    job = world.children["Job", "sums-trainer-1"].metadata.uid
    assert found(world)[job] == STALLED_SECONDS
    world.make_pods()
    assert job not in found(world)
    world.pods.clear()
    world.fail_job()
    assert job not in found(world)


def test_a_pending_claim_is_stalled(world):
    claim = world.children["PersistentVolumeClaim", "sums-storage"]
    claim.body["status"] = {"phase": "Pending"}
    assert claim.metadata.uid in found(world)
    claim.body["status"] = {"phase": "Bound"}
    assert found(world) == {}


def test_a_volume_that_cannot_be_mounted_is_reported(world):
    uid = waits_silently(world, "runner")
    world.now += STALLED_SECONDS
    world.warnings[uid] = 'volume keys cannot be mounted: secret "keys" not found'
    world.settle()
    text = '1 of 1 runner pod waiting: volume keys cannot be mounted: secret "keys" not found'
    assert world.condition("Ready") == ("False", "ContainerCreateFailed", text)


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        (
            'Error creating: pods "sums-trainer-1-0-" is forbidden: violates PodSecurity "restricted:latest": host '
            "namespaces (hostNetwork=true)",
            "PodsForbidden",
            'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)',
        ),
        (
            'Error creating: pods "sums-trainer-1-0-" is forbidden: exceeded quota: pods, requested: pods=1, used: '
            "pods=5, limited: pods=5",
            "QuotaExceeded",
            "exceeded quota: pods, requested: pods=1, used: pods=5, limited: pods=5",
        ),
    ],
)
def test_a_job_with_refused_pods_has_a_cause(message, reason, text):
    world = World(trainer={})
    world.settle()
    world.warnings[world.children["Job", "sums-trainer-1"].metadata.uid] = message
    world.make_pods()
    world.pods = {name: pod for name, pod in world.pods.items() if "trainer" not in name}
    world.ready()
    world.settle()
    assert world.condition("Ready") == ("False", reason, f"1 of 1 trainer pod refused: {text}")


def test_a_claim_with_a_missing_class_is_reported(world):
    claim = world.children["PersistentVolumeClaim", "sums-storage"]
    claim.body["status"] = {"phase": "Pending"}
    claim.body["spec"]["storageClassName"] = "fast"
    world.warnings[claim.metadata.uid] = 'storageclass.storage.k8s.io "fast" not found'
    world.unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "runner")
    world.settle()
    text = "claim sums-storage requests StorageClass fast, which does not exist; create the class, or create the claim "
    text += "again with an existing one (kubectl get storageclass)"
    assert world.condition("Ready")[1:] == ("VolumeClaimPending", f"1 of 1 runner pod pending: {text}")


NO_CLASS = 'storageclass.storage.k8s.io "nope" not found'
NO_CLASS_MESSAGE = (
    "requests StorageClass nope, which does not exist; create the class, or create the claim again with an existing "
    "one (kubectl get storageclass)"
)


def test_the_missing_class_of_a_claim_in_spec_storage_claim_is_named():
    world = World(storage={"claim": "mine"})
    world.settle()
    world.make_pods()
    world.unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found")
    world.settle()
    pods, key = world.pods.values(), "PersistentVolumeClaim/mine"
    assert found(world) == {}
    assert stalled(pods, world.children, world.now, "mine") == {key: STALLED_SECONDS}
    for pod in pods:
        put(pod.status.conditions[0], last_transition_time=instant(world.now))
    world.now += STALLED_SECONDS
    assert stalled(pods, world.children, world.now, "mine") == {key: 0}
    assert world.settle().after == ASK_SECONDS
    assert "claim mine (spec.storage.claim) is not bound: kubectl describe" in world.condition("Ready")[2]
    world.warnings = {key: NO_CLASS}
    world.settle()
    assert f"claim mine (spec.storage.claim) {NO_CLASS_MESSAGE}" in world.condition("Ready")[2]
