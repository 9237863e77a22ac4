"""A judge in a frozen pool, in pods: the reward reaches its engine by a Service; a deleted engine loses no sample."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.pods.job import RESTRICTED, SMALL_MODEL, Job, quickstart
from tools.cluster.client import Object
from tools.cluster.node import Cluster

START_SECONDS = 800.0
REPLACED_SECONDS = 400.0
READY_SECONDS = 60.0
TEMPLATE = "{{ messages[0]['content'][-40:] }}"
"""Chat template of the judge, which is the quickstart's model: it has none, and no positions for a whole prompt."""

pytestmark = pytest.mark.timeout(1500)


def manifest() -> Object:
    """Return the quickstart with a judge that finds no verdict: it counts as 0 of each sample."""
    spec = quickstart()["spec"]
    config = {"pool": "judge", "maxTokens": 16}
    clear = {"name": "clear", "builtin": "judge", "config": config, "timeoutSeconds": 30, "notScoredReward": 0}
    pool = {"name": "judge", "model": "judge", "maxModelLength": 256, "args": [f"--chat-template={TEMPLATE}"]}
    body = quickstart(
        initializer=SMALL_MODEL,
        models=[*spec["models"], {"name": "judge", "source": "job://model"}],
        training=spec["training"] | {"steps": 200, "promptsPerStep": 8},
        evaluation=None,
        tasks=[spec["tasks"][0] | {"moreRewards": [{"name": "clear", "weight": 0.1}]}],
        rewards=[*spec["rewards"], clear],
        rollouts=[*spec["rollouts"], pool],
    )
    body["metadata"]["name"] = "judged"
    return body


def test_a_job_trains_with_a_judge_of_its_own_whose_pod_is_deleted(node: Cluster, installed: Any) -> None:
    job = Job(node, node.namespace("judged", RESTRICTED), manifest())
    job.apply()
    job.reaches(1, START_SECONDS)
    job.until(lambda: job.status()["ready"]["rollout"] == "2/2", READY_SECONDS, "2 of 2 engines to be ready")
    before = job.pod("rollout-judge")["metadata"]["name"]
    job.kubectl("delete", "pod", before, "--wait=false")
    reached = job.step()
    [after] = job.has_pods("rollout-judge", 1, REPLACED_SECONDS)
    job.reaches(reached + 3, REPLACED_SECONDS)
    assert after["metadata"]["name"] != before
    ends = {row["state"] for row in job.ledger("SELECT DISTINCT state FROM samples")}
    assert "failed" not in ends
    asked = job.ledger("SELECT COUNT(*) AS n FROM scores WHERE metrics LIKE '%reward/clear%'")
    assert asked[0]["n"] > 0
    node.api.delete(f"/api/v1/namespaces/{job.namespace}")
