"""What says only in events what keeps it is found, asked about, and said in the conditions."""

import pytest

from rljob.operator.api_types import ObjectCondition
from rljob.operator.planning.stalled import ASK_SECONDS, PATIENCE, stalled
from rljob.operator.planning.timestamps import instant

from .world import World, put


@pytest.fixture
def world():
    made = World(rollouts=[{"name": "main"}], trainer={})
    made.run_up()
    return made


def being_made(world, name):
    """Have a pod find a node and its containers wait without a word."""
    world.waiting("ContainerCreating", "", name)
    [pod] = world.find(name)
    put(pod.status, phase="Pending")
    scheduled = ObjectCondition("PodScheduled", "True", last_transition_time=instant(world.now))
    put(pod.status, conditions=[scheduled, ObjectCondition("Ready", "False")])
    return pod.metadata.uid


def found(world):
    return stalled(world.pods.values(), world.children, world.now)


def test_a_pod_whose_containers_wait_without_a_word_is_asked_about_after_a_while(world):
    uid = being_made(world, "runner")
    assert found(world) == {uid: PATIENCE}
    assert world.settle().after == PATIENCE
    world.now += PATIENCE
    assert found(world) == {uid: 0}
    assert world.settle().after == ASK_SECONDS


@pytest.mark.parametrize("reason", ["ErrImagePull", "CreateContainerConfigError", "CrashLoopBackOff"])
def test_a_pod_that_says_why_it_waits_is_not_asked_about(world, reason):
    being_made(world, "runner")
    world.waiting(reason, "why", "runner")
    assert found(world) == {}


def test_nothing_of_a_job_that_runs_is_asked_about(world):
    assert found(world) == {}
    assert world.settle().after is None


def test_a_job_without_pods_is_asked_about_until_it_has_some_or_has_ended():
    world = World()
    world.settle()
    job = world.children["Job", "sums-trainer-1"].metadata.uid
    assert found(world)[job] == PATIENCE
    world.make_pods()
    assert job not in found(world)
    world.pods.clear()
    world.fail_job()
    assert job not in found(world)


def test_a_claim_that_waits_for_a_volume_is_asked_about(world):
    claim = world.children["PersistentVolumeClaim", "sums-storage"]
    claim.body["status"] = {"phase": "Pending"}
    assert claim.metadata.uid in found(world)
    claim.body["status"] = {"phase": "Bound"}
    assert found(world) == {}


def test_a_volume_that_cannot_be_mounted_is_said(world):
    uid = being_made(world, "runner")
    world.now += PATIENCE
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
def test_a_job_whose_pods_are_refused_says_why(message, reason, text):
    world = World(trainer={})
    world.settle()
    world.warnings[world.children["Job", "sums-trainer-1"].metadata.uid] = message
    world.make_pods()
    world.pods = {name: pod for name, pod in world.pods.items() if "trainer" not in name}
    world.ready()
    world.settle()
    assert world.condition("Ready") == ("False", reason, f"1 of 1 trainer pod refused: {text}")


def test_a_claim_says_what_its_class_says(world):
    claim = world.children["PersistentVolumeClaim", "sums-storage"]
    claim.body["status"] = {"phase": "Pending"}
    claim.body["spec"]["storageClassName"] = "fast"
    world.warnings[claim.metadata.uid] = 'storageclass.storage.k8s.io "fast" not found'
    world.unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "runner")
    world.settle()
    said = (
        "claim sums-storage wants StorageClass fast, which does not exist; create the class, or create the claim again "
    )
    said += "with an existing one (kubectl get storageclass)"
    assert world.condition("Ready")[1:] == ("VolumeClaimPending", f"1 of 1 runner pod pending: {said}")


NO_CLASS = 'storageclass.storage.k8s.io "nope" not found'
NO_CLASS_SAID = (
    "wants StorageClass nope, which does not exist; create the class, or create the claim again with an existing one "
    "(kubectl get storageclass)"
)


def test_the_class_of_a_claim_that_the_job_was_given_is_named_when_it_is_not_there():
    world = World(storage={"claim": "mine"})
    world.settle()
    world.make_pods()
    world.unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found")
    world.settle()
    pods, key = world.pods.values(), "PersistentVolumeClaim/mine"
    assert found(world) == {}
    assert stalled(pods, world.children, world.now, "mine") == {key: PATIENCE}
    for pod in pods:
        put(pod.status.conditions[0], last_transition_time=instant(world.now))
    world.now += PATIENCE
    assert stalled(pods, world.children, world.now, "mine") == {key: 0}
    assert world.settle().after == ASK_SECONDS
    assert "claim mine (spec.storage.claim) is not bound: kubectl describe" in world.condition("Ready")[2]
    world.warnings = {key: NO_CLASS}
    world.settle()
    assert f"claim mine (spec.storage.claim) {NO_CLASS_SAID}" in world.condition("Ready")[2]
