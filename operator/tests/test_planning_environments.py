"""Environment services in plans: readiness, scaling, and exits of their processes."""

from __future__ import annotations

import pytest

from .world import World

LAKE = {"name": "lake", "builtin": "frozen_lake"}
ROLE = "environment-lake"
OWN = {"spec": {"containers": [{"name": "main", "image": "mine/maze"}]}}


def running(**environment: object) -> World:
    world = World(environments=[{**LAKE, **environment}], failurePolicy={"maxRestarts": 2})
    world.run_up()
    return world


def test_a_job_is_not_ready_without_its_environment() -> None:
    world = running(replicas={"min": 2})
    assert (world.role(ROLE).ready, world.role(ROLE).desired) == (2, 2)
    assert world.status.ready.environment == "2/2"
    assert world.condition("Ready")[:2] == ("True", "Running")
    world.waiting("ErrImagePull", "not found", ROLE)
    world.settle()
    assert world.condition("Ready")[:2] == ("False", "ImagePullFailed")
    assert "environment-lake" in world.condition("Ready")[2]
    assert world.status.ready.environment == "0/2"


def test_an_environment_is_scaled_within_its_bounds() -> None:
    world = running(replicas={"min": 1, "max": 3})
    deployment = world.children["Deployment", f"sums-{ROLE}"].body["spec"]
    assert deployment["replicas"] == 1
    world.scale(ROLE, 9)
    world.settle()
    assert world.children["Deployment", f"sums-{ROLE}"].body["spec"]["replicas"] == 3
    world.scale(ROLE, 0)
    world.settle()
    assert world.children["Deployment", f"sums-{ROLE}"].body["spec"]["replicas"] == 1


def test_a_job_without_environments_has_no_count_of_them() -> None:
    world = World()
    world.run_up()
    assert world.status.ready.environment == ""


@pytest.mark.parametrize("form", [{"builtin": "frozen_lake"}, {"builtin": None, "function": "a:b", "template": OWN}])
def test_exit_code_2_of_rljobs_service_ends_the_run(form: dict[str, object]) -> None:
    world = running(**form)
    world.exit(ROLE, 2, message="no such option", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "ConfigurationError"


def test_exit_code_2_of_a_users_container_is_an_ordinary_failure() -> None:
    world = running(builtin=None, template=OWN)
    for _ in range(2):
        world.exit(ROLE, 2, fatal=False)
        world.settle()
        assert world.condition("Failed")[0] == ""
    world.exit(ROLE, 2, fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"
