"""What a plan's status looks like when it is applied."""

from rljob.api.job_status import Attempt, RLJobStatus, RunState
from rljob.operator.plan import Plan

THEN = "2026-01-01T00:00:00Z"


def fields(planned, written):
    return Plan(status=planned).status_fields(written)


def test_what_is_written_and_shall_not_be_is_said_to_be_null_and_what_never_was_is_left_out():
    written = RLJobStatus(suspended_at=THEN, pending_since=THEN)
    said = fields(RLJobStatus(pending_since=THEN), written)
    assert said["suspendedAt"] is None and said["pendingSince"] == THEN
    assert "startTime" not in said and "trainer" not in said


def test_fields_of_the_attempt_go_too_and_so_does_the_attempt():
    written = RLJobStatus(trainer=Attempt(started_at=THEN, not_before=THEN))
    said = fields(RLJobStatus(trainer=Attempt(started_at=THEN)), written)
    assert said["trainer"]["notBefore"] is None
    assert fields(RLJobStatus(), written)["trainer"] is None
    assert "notBefore" not in fields(RLJobStatus(trainer=Attempt(started_at=THEN)), RLJobStatus())["trainer"]


def test_what_the_coordinator_says_is_never_written():
    run = RunState(state="Running")
    for written in (RLJobStatus(), RLJobStatus(run=run)):
        assert "run" not in fields(RLJobStatus(), written)
        assert "run" not in fields(RLJobStatus(run=run), written)
