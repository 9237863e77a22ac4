"""The Secret with the tokens of a job."""

from __future__ import annotations

import json

from rljob.api.models import RLJob
from rljob.operator.api_types import Meta
from rljob.operator.secret import new_secret

from .world import SPEC


def test_each_role_has_its_own_token_and_the_coordinator_those_of_its_clients() -> None:
    job = RLJob.model_validate({"metadata": {"name": "sums"}, "spec": SPEC})
    made = new_secret(Meta(name="sums", namespace="n", uid="0f1e2d3c"), job)["stringData"]
    assert made.keys() == {"trainer", "agent", "runner", "reward", "environment", "pool", "ray", "coordinator"}
    assert len(set(made.values())) == 8
    assert json.loads(made["coordinator"]) == {role: made[role] for role in ("trainer", "agent", "runner")}
