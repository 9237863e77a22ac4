"""Conditions that Flux, Argo CD and kstatus understand: Stalled while only a user can help, Ready at the end."""

from .world import World


def kstatus(world):
    """Return the state that kstatus computes from the conditions of an object.

    Source: sigs.k8s.io/cli-utils/pkg/kstatus/status/generic.go, checkGenericProperties and checkReadyCondition.
    """
    if world.condition("Stalled")[0] == "True":
        return "Failed"
    return {"True": "Current", "False": "InProgress", "": "Unknown"}[world.condition("Ready")[0]]


def test_a_job_is_in_progress_while_it_starts_and_current_while_it_runs():
    world = World()
    world.settle()
    assert kstatus(world) == "InProgress"
    world.run_up()
    assert kstatus(world) == "Current"


def test_a_job_that_succeeded_stays_ready():
    world = World()
    world.run_up()
    world.tell(state="Succeeded")
    world.settle()
    assert kstatus(world) == "Current" and world.condition("Ready")[:2] == ("True", "Succeeded")
    assert [reason for _, reason in world.events].count("Succeeded") == 1


def test_a_failed_job_is_stalled_with_the_reason_of_its_failure():
    world = World()
    world.run_up()
    world.tell(state="Failed", reason="LogprobMismatch", message="the weights differ by 0.1")
    world.settle()
    assert kstatus(world) == "Failed"
    assert world.condition("Stalled") == world.condition("Failed")
    assert [reason for _, reason in world.events].count("LogprobMismatch") == 1


def test_an_invalid_spec_is_stalled_until_it_is_corrected():
    world = World()
    world.run_up()
    world.problems = ["spec.training.steps: must be at least 0, not -1"]
    world.settle()
    assert kstatus(world) == "Failed" and world.condition("Stalled")[1] == "InvalidSpec"
    world.problems = []
    world.settle()
    assert kstatus(world) == "Current" and world.condition("Stalled") == ("", "", "")
