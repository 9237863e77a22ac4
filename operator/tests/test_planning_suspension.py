"""Suspend and resume."""

import pytest

from .world import World


@pytest.fixture
def world():
    made = World(suspendGraceSeconds=30)
    made.run_up()
    return made


def test_a_suspended_run_has_time_for_a_checkpoint(world):
    world.change(suspend=True)
    made = world.plan()
    assert made.record_first
    assert made.after == 30
    assert made.deletions == []
    assert world.condition("Suspended")[:2] == ("False", "Suspending")
    assert world.why == "Suspending"


def test_pods_are_deleted_after_the_report_of_the_coordinator_and_storage_stays(world):
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


def test_a_report_for_an_earlier_generation_is_ignored(world):
    world.tell(state="Suspended", observed_generation=1)
    world.change(suspend=True)
    world.settle()
    assert world.names("StatefulSet")


def test_the_wait_for_the_coordinator_ends_with_the_grace_period(world):
    world.change(suspend=True)
    world.settle()
    world.now += 29
    world.settle()
    assert world.names("StatefulSet")
    world.now += 1
    world.settle()
    assert world.names("StatefulSet") == []
    assert world.condition("Suspended")[0] == "True"


def test_a_clock_set_back_restarts_the_grace_period(world):
    world.change(suspend=True)
    world.settle()
    world.now -= 7200
    assert world.settle().after == 30
    world.now += 30
    world.settle()
    assert world.condition("Suspended")[0] == "True"


def test_a_resumed_run_has_a_new_attempt_and_a_new_active_deadline(world):
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
    for _ in range(2):  # engines follow when the trainer has its nodes
        world.make_pods()
        world.ready()
        world.settle()  # status.run is still Suspended, from before the resume
    assert world.names("Job") == ["sums-trainer-2"]
    world.tell(state="Running", observed_generation=1)
    world.settle()
    assert world.why == "Starting"
    world.tell(state="Running")
    world.settle()
    assert world.why == "Running"
    assert world.role("trainer").restarts == 0


def test_a_job_created_suspended_creates_nothing():
    world = World(suspend=True)
    world.settle()
    assert not world.children
    assert world.why == "Suspended"
    assert world.status.start_time is None
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_a_job_suspended_during_initialization_does_not_wait():
    world = World(initializer={"command": ["make"]}, suspend=False)
    world.settle()
    world.change(suspend=True)
    world.settle()
    assert world.names("Job") == []
    assert world.condition("Suspended")[0] == "True"
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-initializer"]


def test_a_resume_during_suspension_keeps_every_role(world):
    world.change(suspend=True)
    world.settle()
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]
    assert world.names("StatefulSet")
    assert world.status.suspended_at is None


def test_a_suspension_reverted_before_the_reconcile_changes_nothing(world):
    world.change(suspend=True)
    world.change(suspend=False)
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_terminating_pods_are_reported(world):
    pods = dict(world.pods)
    world.change(suspend=True)
    world.tell(state="Suspended")
    world.settle()
    world.pods = pods
    world.settle()
    assert world.condition("Suspended") == ("False", "Suspending", "pods are being deleted")


def test_the_active_deadline_does_not_apply_to_a_suspended_job(world):
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
        world.status.suspended_at = since  # another manager owns the field and writes it again
    assert world.status.trainer.number == 2
    world.now += 1000
    world.change(suspend=True)
    assert world.plan().after == 30  # a new suspension has the full grace period
    assert world.status.suspended_at != since


def test_a_suspended_at_written_by_a_user_is_removed_and_restarts_nothing(world):
    world.status.suspended_at = "2026-01-01T00:00:00Z"
    world.plan()
    assert world.status.suspended_at is None
    assert world.status.trainer.number == 1
