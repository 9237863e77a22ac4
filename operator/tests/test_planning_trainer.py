"""Attempts of the trainer: causes of their end, costs, and the start of the next attempt."""

import copy

import pytest
from msgspec.structs import replace

from rljob.api.job_status import RLJobStatus
from rljob.operator.api_types import ObjectCondition
from rljob.operator.planning.timestamps import instant

from .world import BEGIN, World, put


@pytest.fixture
def world():
    made = World(failurePolicy={"maxRestarts": 3})
    made.run_up()
    return made


def fail(world, code=1, message=""):
    """Fail a pod of the trainer, and its Job."""
    world.exit("trainer-", code, message=message)
    world.fail_job()


def again(world):
    """Create the decided attempt and make it ready."""
    world.settle()
    world.now += 60
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()


def test_a_failed_pod_restarts_the_group_as_the_next_attempt(world):
    world.now += 30
    fail(world, message="loading\nCUDA out of memory")
    made = world.plan()
    assert made.record_first
    assert world.names("Job") == []  # the old Job was deleted, the next is backed off
    assert made.after == 1
    assert world.status.trainer.number == 2
    assert world.why == "TrainerRestarting"
    assert "CUDA out of memory" in world.condition("Ready")[2]
    assert ("Warning", "TrainerRestarted") in world.events
    world.now += 1
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]
    assert world.role("trainer").restarts == 1
    assert world.role("trainer").last_exit == "exit code 1"
    assert world.role("trainer").ready == 0
    world.make_pods()
    world.ready()
    world.settle()
    assert world.condition("Ready")[:2] == ("True", "Running")


def test_quick_failures_are_backed_off_exponentially():
    world = World(failurePolicy={"maxRestarts": 20})
    world.run_up()
    waits = []
    for _ in range(9):
        world.make_pods()
        fail(world)
        waits.append(world.plan().after)
        world.now += waits[-1]
        world.settle()
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_ten_minutes_of_work_offset_one_failure():
    world = World(failurePolicy={"maxRestarts": 20})
    world.run_up()
    for _ in range(2):
        fail(world)
        again(world)
    charged = world.status.trainer.charged
    world.now += 600
    fail(world)
    world.settle()
    assert world.status.trainer.charged == pytest.approx(charged, abs=0.2)


def test_an_attempt_without_a_node_is_reported_as_pending(world):
    fail(world)
    world.settle()
    world.now += 60
    world.settle()
    world.make_pods()
    world.unschedulable("0/1 nodes are available: 1 node(s) were unschedulable.", "trainer-2")
    world.settle()
    status, reason, message = world.condition("Ready")
    assert (status, reason) == ("False", "PodsPending")
    assert message.startswith("2 of 2 trainer pods pending: nodes are cordoned")


def test_more_failures_than_allowed_end_the_run(world):
    for _ in range(3):
        fail(world, 137)
        again(world)
    fail(world, 137, "killed")
    made = world.plan()
    assert made.record_first
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "MaxRestartsExceeded")
    assert "exceeded spec.failurePolicy.maxRestarts (3)" in message
    assert "killed by signal 9: killed" in message
    assert world.names("Job") == ["sums-trainer-4"]  # for its log
    assert world.names("Deployment") == []
    assert world.role("trainer").restarts == 3
    assert world.role("trainer").last_exit == "killed by signal 9"


@pytest.mark.parametrize("how", ["pod", "rule"])
def test_a_disruption_is_free(world, how):
    world.now += 60
    if how == "pod":
        world.disrupt("trainer-")
        fail(world, 143)
    else:
        message = "Pod default/x has condition DisruptionTarget matching FailJob rule at index 0"
        world.fail_job("PodFailurePolicy", message)
    made = world.plan()
    assert world.status.trainer.number == 2
    assert world.status.trainer.charged == 0
    assert world.names("Job") == ["sums-trainer-2"]  # at once
    assert made.after is None
    assert ("Normal", "TrainerRestarted") in world.events


def test_repeated_quick_disruptions_are_backed_off(world):
    waits = []
    for _ in range(4):
        world.make_pods()
        world.disrupt("trainer-")
        fail(world, 143)
        waits.append(world.plan().after)
        world.now += waits[-1]
        world.settle()
    assert waits == [1, 2, 4, 8]
    assert world.status.trainer.charged == 0


def test_exit_code_2_ends_the_run_with_its_termination_message(world):
    world.exit("trainer-", 2, message="rljob: spec.training: batch does not fit")
    world.fail_job("PodFailurePolicy", "Container main failed with exit code 2 matching FailJob rule at index 1")
    made = world.plan()
    assert made.record_first
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "ConfigurationError")
    assert message.endswith("exit code 2: rljob: spec.training: batch does not fit")


def test_a_job_that_a_user_deleted_is_followed_by_the_next_attempt(world):
    world.remove(("Job", "sums-trainer-1"))
    world.settle()
    assert world.status.trainer.number == 2
    world.now += 60
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]
    assert world.status.trainer.charged == 0


def test_a_recorded_attempt_without_a_job_is_created_under_its_number():
    world = World()
    made = world.decide()
    world.status = made.status  # then the operator crashed
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_a_change_of_its_template_starts_the_next_attempt(world):
    world.change(trainer={"nodes": 2, "template": {"spec": {"nodeSelector": {"zone": "a"}}}})
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]
    assert world.status.trainer.charged == 0
    assert world.role("trainer").restarts == 0


def test_after_a_lost_status_no_number_is_used_twice(world):
    for _ in range(2):
        fail(world)
        again(world)
    world.status = RLJobStatus()
    world.settle()
    assert world.status.trainer.number == 3
    assert world.names("Job") == ["sums-trainer-3"]


def test_a_pod_on_a_lost_node_ends_the_attempt(world):
    pod = world.find("trainer-")[0]
    put(pod, metadata=replace(pod.metadata, deletion_timestamp=instant(world.now)))
    assert world.settle().after == 15
    world.now += 15
    world.plan()
    assert world.status.trainer.number == 2
    assert world.status.trainer.charged == 0
    assert world.role("trainer").last_exit == "node lost"


def test_a_failure_target_ends_the_attempt_before_the_last_pod_ends(world):
    world.exit("trainer-", 1)
    world._end_job("trainer", "FailureTarget", "BackoffLimitExceeded", "")
    world.plan()
    assert world.status.trainer.number == 2


def test_after_exit_code_0_the_coordinator_has_time_to_report_the_end(world):
    world.complete_job()
    assert world.settle().after == 30
    world.tell(state="Succeeded")
    world.settle()
    assert world.condition("Complete")[0] == "True"


def test_a_trainer_that_exits_with_0_before_the_end_of_the_run_is_restarted(world):
    world.complete_job()
    world.now += 30
    world.plan()
    assert world.status.trainer.number == 2
    assert world.status.trainer.charged == 1


def test_a_clock_set_back_restarts_nothing_and_ends_no_run():
    world = World(activeDeadlineSeconds=3600, failurePolicy={"maxRestarts": 3, "pendingSeconds": 60})
    world.run_up()
    world.now = BEGIN - 86_400
    made = world.settle()
    assert world.why == "Running"
    assert world.status.trainer.number == 1
    assert made.deletions == []


def test_a_clock_set_back_before_a_back_off_ends_it(world):
    fail(world)
    world.plan()
    world.now -= 3600
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]


def test_pods_of_an_earlier_attempt_are_ignored(world):
    old = world.find("trainer-1")
    fail(world)
    again(world)
    for pod in old:
        world.pods[pod.metadata.name] = pod
    world.ready()
    world.settle()
    assert world.role("trainer").ready == 2
    assert world.status.trainer.number == 2


def test_the_pod_that_failed_first_is_reported(world):
    first, second = world.find("trainer-")
    world.exit(first.metadata.name, 143)
    world.now -= 5
    world.exit(second.metadata.name, 139)
    world.now += 5
    world.fail_job()
    world.plan()
    assert world.status.trainer.cause == f"pod {second.metadata.name}: killed by signal 11"


def test_after_a_restored_status_no_number_is_used_twice(world):
    earlier = world.status
    fail(world)
    again(world)
    world.status = earlier
    made = world.plan()
    assert made.deletions == []
    assert world.status.trainer.number == 2
    assert world.names("Job") == ["sums-trainer-2"]


def test_a_failed_pod_is_reported_before_its_job_fails(world):
    world.exit(world.find("trainer-")[0].metadata.name, 1, message="out of memory")
    world.settle()
    text = "1 of 2 trainer pods ended: exit code 1: out of memory"
    assert world.condition("Ready") == ("False", "TrainerRestarting", text)
    world.fail_job()
    world.settle()
    assert world.why == "TrainerRestarting"
    assert [reason for _, reason in world.events].count("TrainerRestarting") == 1


def test_a_job_without_pods_is_named():
    world = World()
    world.settle()
    assert world.decide().after == 8  # then its events are read, repeatedly
    world.now += 60
    world.settle()
    text = "2 of 2 trainer pods not created yet: refused, or a quota is used up; "
    text += "kubectl describe job sums-trainer-1 shows the reason"
    assert world.role("trainer").summary == text
    assert world.why == "PodsForbidden"
    assert world.decide().after == 10


def test_a_deleted_pod_is_not_reported_as_refused(world):
    world.now += 3600
    job = world.children["Job", "sums-trainer-1"]
    gone = world.find("trainer-")[0]
    del world.pods[gone.metadata.name]
    job.body["status"] = {"active": 1, "terminating": 1}
    world.settle()
    assert "refused" not in world.role("trainer").summary
    assert world.why == "PodsNotReady"


def test_a_job_without_pods_counts_as_pending():
    world = World(failurePolicy={"pendingSeconds": 100})
    world.settle()
    world.now += 60
    world.settle()
    assert world.status.pending_since is not None
    world.now += 101
    world.settle()
    assert world.condition("Failed")[1] == "PendingTimeout"


def test_restarts_are_shown_in_a_column(world):
    fail(world)
    again(world)
    world.exit("runner", 1, fatal=False)
    world.settle()
    assert world.status.ready.restarts == "runner 1, trainer 1"


def test_exit_code_2_in_the_job_condition_ends_the_run(world):
    world.pods = {name: pod for name, pod in world.pods.items() if "trainer" not in name}
    message = "Container main for pod default/x failed with exit code 2 matching FailJob rule at index 1"
    world.fail_job("PodFailurePolicy", message)
    world.settle()
    assert world.condition("Failed")[1:] == (
        "ConfigurationError",
        f"the trainer rejects its configuration: {message}",
    )


RULE_2 = "Container main for pod default/x failed with exit code 2 matching FailJob rule at index 1"


def test_the_exit_behind_a_failed_job_is_awaited(world):
    """The watch of pods may be behind the watch of Jobs; the Job says only which exit code it was."""
    world.fail_job("PodFailurePolicy", RULE_2)
    made = world.plan()
    assert world.condition("Failed")[0] == ""
    assert made.after == 5
    world.now += 1
    world.exit("trainer-", 2, message="rljob: spec.training: batch does not fit")
    world.settle()
    assert world.condition("Failed")[2].endswith("exit code 2: rljob: spec.training: batch does not fit")


@pytest.mark.parametrize("seconds", [5, -1])
def test_an_exit_that_never_shows_is_awaited_for_seconds(world, seconds):
    """Not at all if the clocks of the cluster and the operator differ."""
    world.fail_job("PodFailurePolicy", RULE_2)
    world.now += seconds
    world.settle()
    assert world.condition("Failed")[2] == f"the trainer rejects its configuration: {RULE_2}"


def test_the_cause_of_a_charged_failure_is_awaited(world):
    world.fail_job()
    assert world.plan().after == 5
    assert world.status.trainer.number == 1
    world.exit("trainer-", 1, message="CUDA out of memory")
    world.plan()
    assert world.status.trainer.number == 2
    assert "CUDA out of memory" in world.status.trainer.cause


def test_exit_code_20_is_not_exit_code_2(world):
    world.pods = {name: pod for name, pod in world.pods.items() if "trainer" not in name}
    world.fail_job("PodFailurePolicy", "Container main for pod default/x failed with exit code 20")
    world.plan()
    assert world.status.trainer.number == 2


def lose_label(world, ref):
    """Remove the label rljob.dev/job from an object: it exists, but the operator does not see it."""
    return world.children.pop(ref).metadata.uid


def test_a_job_without_its_label_is_deleted_before_the_next_attempt_starts(world):
    uid = lose_label(world, ("Job", "sums-trainer-1"))
    made = world.decide()
    assert made.status.trainer.number == 2
    assert (("Job", "sums-trainer-1"), uid) in made.deletions
    world.status = made.status  # then the operator crashed
    assert (("Job", "sums-trainer-1"), uid) in world.decide().deletions
    world.plan()
    assert not world.find("trainer-1")
    assert world.decide().deletions == []


@pytest.mark.parametrize("how", ["Succeeded", "suspend"])
def test_a_job_without_its_label_is_deleted_with_the_run(world, how):
    world.tell(state="Succeeded") if how == "Succeeded" else world.change(suspend=True)
    if how == "suspend":
        world.tell(state="Suspended")
    uid = lose_label(world, ("Job", "sums-trainer-1"))
    assert (("Job", "sums-trainer-1"), uid) in world.plan().deletions


def test_a_foreign_job_is_not_deleted_for_a_pod_with_our_labels(world):
    pod = world.find("trainer-")[0]
    owner = replace(pod.metadata.owner_references[0], name="theirs", uid="theirs")
    labels = {**pod.metadata.labels, "rljob.dev/attempt": "0"}
    world.pods["x"] = replace(pod, metadata=replace(pod.metadata, name="x", labels=labels, owner_references=[owner]))
    assert world.decide().deletions == []


@pytest.mark.parametrize("how", ["being deleted", "gone, its pods are not"])
def test_the_number_of_a_job_deleted_before_it_was_recorded_is_not_reused(how):
    world = World()
    world.plan()
    ref = "Job", "sums-trainer-1"
    assert world.status.trainer.job_uid == ""
    if how == "being deleted":
        put(world.children[ref].metadata, deletion_timestamp=instant(world.now))
    else:
        world.make_pods()
        lose_label(world, ref)
    world.plan()
    assert world.status.trainer.number == 2


def test_a_job_with_late_pods_is_recorded():
    world = World()
    world.plan()
    assert world.settle().after == 8
    assert world.status.trainer.job_uid == ""
    world.now += 60
    world.plan()
    assert world.status.trainer.job_uid == world.children["Job", "sums-trainer-1"].metadata.uid


def test_waiting_for_a_node_offsets_no_failure():
    world = World(failurePolicy={"maxRestarts": 3})
    world.run_up()
    for _ in range(4):
        assert world.condition("Failed")[0] == ""
        fail(world)
        world.settle()
        world.now += 60
        world.settle()
        world.make_pods()
        world.now += 700  # until a node is free
        world.ready()
        world.settle()
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"


def test_waiting_for_the_last_pod_of_the_gang_offsets_no_failure(world):
    fail(world)
    again(world)
    charged = world.status.trainer.charged
    last = world.find("trainer-")[-1]
    world.now += 700
    conditions = [ObjectCondition("PodScheduled", "True", last_transition_time=instant(world.now))]
    put(last.status, conditions=conditions)
    fail(world)
    world.settle()
    assert world.status.trainer.charged == charged + 1


def test_work_is_counted_from_the_start_of_the_container(world):
    fail(world)
    again(world)
    charged = world.status.trainer.charged
    world.now += 700  # while the image is pulled
    fail(world)
    for pod in world.find("trainer-"):
        put(pod.status.container_statuses[0].state.terminated, started_at=instant(world.now))
    world.settle()
    assert world.status.trainer.charged == charged + 1


def test_an_exit_at_an_unknown_time_comes_after_those_at_known_times(world):
    first, other = world.find("trainer-")
    world.exit(first.metadata.name, 137)
    world.exit(other.metadata.name, 1)
    world.fail_job()
    put(first.status.container_statuses[0].state.terminated, finished_at=None)
    world.settle()
    assert world.status.trainer.number == 2 and "exit code 1" in world.status.trainer.cause


def test_a_pod_created_by_a_user_is_ignored(world):
    pod = copy.deepcopy(world.find("runner")[0])
    world.pods["debug"] = replace(pod, metadata=replace(pod.metadata, name="debug", owner_references=[]))
    world.exit("debug", 2)
    world.settle()
    assert world.condition("Failed")[0] == ""
    assert world.why == "Running"


def test_exit_code_2_of_a_users_reward_is_an_ordinary_failure():
    reward = {"name": "exact", "template": {"spec": {"containers": [{"name": "main", "image": "mine/go-service"}]}}}
    world = World(rewards=[reward], failurePolicy={"maxRestarts": 2})
    world.run_up()
    for _ in range(2):
        world.exit("reward-exact", 2, message="panic: runtime error", fatal=False)
        world.settle()
        assert world.condition("Failed")[0] == ""
    assert world.role("reward-exact").restarts == 2
    world.exit("reward-exact", 2, fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"


def test_exit_code_2_of_a_built_in_reward_ends_the_run(world):
    world.exit("reward-exact", 2, message="no such dataset", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "ConfigurationError"
