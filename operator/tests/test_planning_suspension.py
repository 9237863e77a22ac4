"""Suspend and resume."""

import pytest

from .world import World


@pytest.fixture
def world():
    made = World(suspendGraceSeconds=30)
    made.run_up()
    return made


def test_a_run_that_is_told_to_stop_is_given_time_for_a_checkpoint(world):
    world.change(suspend=True)
    made = world.plan()
    assert made.record_first
    assert made.after == 30
    assert made.deletions == []
    assert world.condition("Suspended")[:2] == ("False", "Suspending")
    assert world.why == "Suspending"


def test_every_pod_is_freed_once_the_coordinator_says_so_and_what_is_durable_stays(world):
    world.change(suspend=True)
    world.settle()
    world.tell(state="Suspended")
    world.settle()
    assert world.names("Job") == world.names("Deployment") == world.names("StatefulSet") == []
    assert world.names("PersistentVolumeClaim")
    assert world.names("ConfigMap")
    assert world.condition("Suspended")[:2] == ("True", "Suspended")
    assert world.why == "Suspended"
    assert [role.desired for role in world.status.roles] == [0] * 5
    assert world.decide().after is None


def test_what_the_coordinator_said_of_an_earlier_spec_does_not_count(world):
    world.tell(state="Suspended", observed_generation=1)
    world.change(suspend=True)
    world.settle()
    assert world.names("StatefulSet")


def test_a_coordinator_that_never_answers_is_not_waited_for_beyond_the_grace(world):
    world.change(suspend=True)
    world.settle()
    world.now += 29
    world.settle()
    assert world.names("StatefulSet")
    world.now += 1
    world.settle()
    assert world.names("StatefulSet") == []
    assert world.condition("Suspended")[0] == "True"


def test_a_clock_that_goes_back_begins_the_grace_again(world):
    world.change(suspend=True)
    world.settle()
    world.now -= 7200
    assert world.settle().after == 30
    world.now += 30
    world.settle()
    assert world.condition("Suspended")[0] == "True"


def test_a_resumed_run_continues_as_the_next_attempt_and_its_time_begins_again(world):
    begun = world.status.start_time
    world.change(suspend=True)
    world.settle()
    world.tell(state="Suspended")
    world.settle()
    world.now += 1000
    world.change(suspend=False)
    made = world.plan()
    assert made.record_first
    assert world.status.suspended_at is None
    assert world.status.start_time != begun
    assert world.names("Job") == ["sums-trainer-2"]
    assert world.status.trainer.charged == 0
    assert world.condition("Suspended")[:2] == ("False", "Resumed")
    world.make_pods()
    world.ready()
    world.settle()  # status.run still says Suspended: that was before
    assert world.names("Job") == ["sums-trainer-2"]
    world.tell(state="Running", observed_generation=1)
    world.settle()
    assert world.why == "Starting"
    world.tell(state="Running")
    world.settle()
    assert world.why == "Running"
    assert world.role("trainer").restarts == 0


def test_a_job_that_is_suspended_from_the_start_makes_nothing():
    world = World(suspend=True)
    world.settle()
    assert not world.children
    assert world.why == "Suspended"
    assert world.status.start_time is None
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_a_job_that_is_suspended_while_it_initializes_waits_for_nobody():
    world = World(initializer={"command": ["make"]}, suspend=False)
    world.settle()
    world.change(suspend=True)
    world.settle()
    assert world.names("Job") == []
    assert world.condition("Suspended")[0] == "True"
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-initializer"]


def test_a_resume_before_the_suspension_is_done_loses_no_part(world):
    world.change(suspend=True)
    world.settle()
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]
    assert world.names("StatefulSet")
    assert world.status.suspended_at is None


def test_a_suspension_that_was_taken_back_before_it_was_seen_changes_nothing(world):
    world.change(suspend=True)
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_pods_that_are_still_ending_are_said(world):
    pods = dict(world.pods)
    world.change(suspend=True)
    world.tell(state="Suspended")
    world.settle()
    world.pods = pods
    world.settle()
    assert world.condition("Suspended") == ("False", "Suspending", "pods are being deleted")


def test_a_suspended_job_does_not_run_out_of_time(world):
    world.change(suspend=True, activeDeadlineSeconds=100)
    world.settle()
    world.tell(state="Suspended")
    world.now += 1000
    world.settle()
    assert world.why == "Suspended"


def test_a_job_is_resumed_once_even_if_another_user_keeps_its_suspension_in_the_status(world):
    world.change(suspend=True)
    world.settle()
    world.tell(state="Suspended")
    world.settle()
    since = world.status.suspended_at
    world.change(suspend=False)
    for _ in range(4):
        world.plan()
        world.status.suspended_at = since  # another manager owns it, and it is there again
    assert world.status.trainer.number == 2
    world.now += 1000
    world.change(suspend=True)
    assert world.plan().after == 30  # a new suspension has its whole grace
    assert world.status.suspended_at != since


def test_a_suspension_that_a_user_writes_into_the_status_is_taken_out_and_restarts_nothing(world):
    world.status.suspended_at = "2026-01-01T00:00:00Z"
    world.plan()
    assert world.status.suspended_at is None
    assert world.status.trainer.number == 1
