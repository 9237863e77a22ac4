"""Admission by Kueue: nothing runs without it, an evicted job stops with a checkpoint, and its quota is given back."""

import pytest

from rljob.operator.planning.kueue_admission import CREATED_SECONDS

from .queued_world import FLAVOR, WORKLOAD, Queued, running_in_kueue


@pytest.fixture
def world() -> Queued:
    """A job that has been admitted and runs."""
    return running_in_kueue()


def test_nothing_but_the_workload_is_created_before_the_admission():
    world = Queued()
    world.settle()
    assert list(world.children) == [WORKLOAD]
    assert world.workload["spec"]["queueName"] == "research"
    assert [(each["name"], each["count"]) for each in world.workload["spec"]["podSets"]] == [
        ("coordinator", 1),
        ("reward-exact", 1),
        ("runner", 1),
        ("trainer", 2),
        ("rollout-main", 2),
    ]
    world.say(QuotaReserved=("False", "Pending", "insufficient unused quota"))
    world.settle()
    expected = "Workload sums-gang waits in LocalQueue research of Kueue: insufficient unused quota"
    assert world.condition("Ready") == ("False", "Queued", expected)
    assert world.condition("Initialized")[:2] == ("False", "Queued")
    assert world.status.start_time is None, "activeDeadlineSeconds does not count the time in the queue"


def test_quota_without_the_admission_checks_is_no_admission():
    world = Queued()
    world.settle()
    world.say(QuotaReserved=("True", "QuotaReserved", "Quota reserved"))
    world.workload["status"]["admissionChecks"] = [{"name": "nodes", "state": "Pending", "message": "being created"}]
    made = world.settle()
    assert list(world.children) == [WORKLOAD] and made.desired == [], "its pod sets cannot be changed any more"
    assert world.condition("Ready")[2].endswith("of Kueue: nodes: being created")


def test_pods_of_an_admitted_job_get_the_nodes_of_their_flavor(world):
    for name in ("sums-rollout-main", "sums-runner"):
        spec = world.children["Deployment", name].body["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == {"pool": "h100"} and FLAVOR.tolerations[0] in spec["tolerations"]
    job = world.children["Job", "sums-trainer-1"].body["spec"]["template"]["spec"]
    assert job["nodeSelector"] == {"pool": "h100"}
    assert "nodeSelector" not in world.children["StatefulSet", "sums-coordinator"].body["spec"]["template"]["spec"]
    sets = {each["name"]: each["template"]["spec"] for each in world.workload["spec"]["podSets"]}
    assert "nodeSelector" not in sets["trainer"], "the flavor is the answer, not a part of the question"
    assert world.kueue_says("PodsReady") == ("True", "Started")


def test_a_flavor_that_cannot_be_read_starts_nothing():
    world = Queued()
    world.settle()
    world.admit("gone")
    world.settle()
    assert list(world.children) == [WORKLOAD]
    assert "ResourceFlavor gone of Kueue cannot be read" in world.condition("Ready")[2]
    world.flavors["gone"] = FLAVOR
    world.settle()
    assert world.names("StatefulSet") == ["sums-coordinator"]


def test_a_flavor_that_contradicts_a_template_is_reported():
    template = {"spec": {"nodeSelector": {"pool": "a100"}}}
    world = Queued(trainer={"nodes": 1, "template": template})
    world.settle()
    world.admit()
    world.settle()
    assert world.why == "InvalidSpec" and "assigns nodes with pool=h100" in world.condition("Ready")[2]


@pytest.mark.parametrize(("reason", "requeued"), [("Preempted", "True"), ("PodsReadyTimeout", "False")])
def test_an_evicted_job_keeps_its_quota_until_its_pods_are_gone(world, reason, requeued):
    world.evict(reason)
    world.settle()
    assert world.status.evicted_at and world.why == "Suspending" and world.names("Job")
    assert f"Kueue has evicted Workload sums-gang: {reason}" in world.condition("Ready")[2]
    assert world.kueue_says("QuotaReserved")[0] == "True"
    world.tell(state="Suspended")
    world.settle()
    assert not world.pods and world.kueue_says("QuotaReserved") == ("False", "Pending")
    assert world.kueue_says("Admitted") == ("False", "NoReservation")
    assert world.kueue_says("Requeued") == (requeued, reason)
    assert "admission" not in world.workload["status"]
    assert world.condition("Suspended")[:2] == ("True", "Suspended") and world.why == "Queued"
    attempt = world.status.trainer.number
    world.admit()
    world.settle()
    assert world.status.evicted_at is None and world.condition("Suspended")[:2] == ("False", "Resumed")
    assert world.status.trainer.number == attempt + 1


def test_an_evicted_job_stops_without_an_answer_after_its_grace_period(world):
    world.evict()
    world.settle()
    world.now += 121
    world.settle()
    assert not world.pods and world.kueue_says("QuotaReserved")[0] == "False"


def test_a_job_whose_workload_was_deleted_stops_and_is_queued_again(world):
    world.remove(WORKLOAD)
    world.settle()
    assert world.why == "Suspending"
    world.tell(state="Suspended")
    world.settle()
    assert not world.pods and world.why == "Queued" and WORKLOAD in world.children


def test_another_size_is_queued_again_and_another_release_is_not(world):
    workload = world.children[WORKLOAD]
    workload.metadata.annotations["rljob.dev/rendered-hash"] = "of another release"
    world.settle()
    assert world.why == "Running"
    world.change(rollouts=[{"name": "main", "replicas": {"min": 3}}])
    world.settle()
    assert world.why == "Suspending" and "was admitted for other pods" in world.condition("Ready")[2]
    world.tell(state="Suspended")
    world.settle()
    assert world.children[WORKLOAD].metadata.uid != workload.metadata.uid
    assert world.workload["spec"]["podSets"][-1]["count"] == 3 and world.why == "Queued"


def test_a_workload_that_waits_follows_the_manifest():
    world = Queued()
    world.settle()
    world.change(rollouts=[{"name": "main", "replicas": {"min": 3}}])
    world.settle()
    assert world.workload["spec"]["podSets"][-1]["count"] == 3


def test_a_suspended_job_and_a_finished_job_have_no_workload(world):
    world.change(suspend=True)
    world.tell(state="Suspended")
    world.settle()
    assert WORKLOAD not in world.children and world.condition("Suspended")[0] == "True"
    world.change(suspend=False)
    world.settle()
    assert world.why == "Queued"
    world.admit()
    world.run_up()
    world.tell(state="Succeeded")
    world.plan()
    assert not world.find("trainer", "rollout") and WORKLOAD in world.children, "pods were there when it was planned"
    world.settle()
    assert WORKLOAD not in world.children and world.find("coordinator"), "the coordinator answers without quota"


def test_without_kueue_the_missing_type_is_reported():
    world = Queued()
    world.refused[WORKLOAD] = "the cluster has no type Workload.kueue.x-k8s.io; install Kueue"
    world.settle()
    assert world.why == "APIRejected" and "install Kueue" in world.condition("Ready")[2]
    assert not world.names("StatefulSet")


def test_kueue_learns_that_pods_are_not_ready_any_more(world):
    world.exit("trainer", 1)
    world.fail_job()
    world.settle()
    assert world.kueue_says("PodsReady") == ("False", "WaitForRecovery")


def test_kueue_learns_of_a_change_once_and_not_before_the_pods_were_ready():
    world = Queued()
    world.settle()
    world.admit()
    world.settle()
    world.finish_initializer()
    world.settle()
    world.make_pods()
    made = world.settle()
    assert made.status_patches == [] and world.kueue_says("PodsReady") == ("", ""), "Kueue counts from the admission"
    world.run_up()
    assert world.kueue_says("PodsReady") == ("True", "Started")
    world.now += 60
    assert world.plan().status_patches == []
    world.exit("trainer", 1)
    world.fail_job()
    world.settle()
    assert world.kueue_says("PodsReady") == ("False", "WaitForRecovery")
    world.now += 1
    assert world.plan().status_patches == []


def test_an_eviction_has_one_instant_however_often_it_is_planned(world):
    world.evict()
    world.settle()
    began = world.status.evicted_at
    for _ in range(2):
        world.now += 7
        world.settle()
    assert world.status.evicted_at == world.status.suspended_at == began is not None


def test_the_priority_of_the_job_orders_the_queue_if_it_is_known():
    gang = {"gang": {"provider": "kueue", "queue": "research"}, "priorityClassName": "high"}
    world = Queued(scheduling=gang)
    assert "priority" not in world.decide().desired[0]["spec"]
    spec = world.decide(priority=7).desired[0]["spec"]
    assert spec["priority"] == 7 and spec["priorityClassRef"]["name"] == "high"


def test_a_job_whose_flavor_cannot_be_read_still_ends():
    world = running_in_kueue()
    world.flavors = {}
    world.settle()
    assert world.why == "APIRejected" and world.find("trainer"), "nothing changes meanwhile"
    world.tell(state="Succeeded")
    world.settle()
    assert world.condition("Complete")[0] == "True"


def test_a_job_whose_flavor_cannot_be_read_still_stops_when_it_is_suspended_or_evicted():
    suspended, evicted = running_in_kueue(), running_in_kueue()
    for world in (suspended, evicted):
        world.flavors = {}
    suspended.change(suspend=True)
    suspended.settle()
    evicted.evict()
    evicted.settle()
    assert (suspended.why, evicted.why) == ("Suspending", "Suspending")


def test_an_evicted_job_whose_claim_another_job_uses_gives_its_quota_back():
    world = Queued()
    world.settle()
    world.claim_in_use = "claim data is used by job other"
    world.admit()
    world.settle()
    world.evict()
    world.settle()
    assert world.kueue_says("QuotaReserved")[0] == "False"


def test_a_job_says_what_its_workload_waits_for_without_an_event_of_kueue():
    world = Queued()
    assert world.plan().after == CREATED_SECONDS
    world.now += CREATED_SECONDS
    world.settle()
    assert world.condition("Ready")[2] == "Workload sums-gang waits in LocalQueue research of Kueue"
