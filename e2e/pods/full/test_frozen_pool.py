"""A judge and a reward model in frozen pools, in pods: the reward reaches the engine by a Service, and a deleted engine
loses no sample. The judge is also the reference of the KL divergence: runners ask it for log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.pods.job import MODEL, RESTRICTED, SMALL_MODEL, Job, quickstart
from tools.cluster.client import Object
from tools.cluster.node import Cluster

START_SECONDS = 800.0
REPLACED_SECONDS = 400.0
READY_SECONDS = 60.0
TEMPLATE = "{{ messages[0]['content'][-40:] }}"
"""Chat template of the judge, which is the quickstart's model: it has none, and no positions for a whole prompt."""
CLASSIFIER = """
import sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
torch.manual_seed(1)
policy, target = sys.argv[1:]
found = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
found.config.pad_token_id = found.config.eos_token_id
found.save_pretrained(target)
AutoTokenizer.from_pretrained(policy).save_pretrained(target)
"""
"""Makes a model of one label from the policy; what the label says is drawn at random."""

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
        algorithm=spec["algorithm"] | {"klCoefficient": 0.01, "referencePool": "judge"},
    )
    body["metadata"]["name"] = "judged"
    return body


def liked_manifest() -> Object:
    """Return the quickstart with a reward model in a frozen pool."""
    spec = quickstart()["spec"]
    config = {"pool": "liked", "format": "text", "activation": "sigmoid", "maxTokens": 128}
    liked = {"name": "liked", "builtin": "reward_model", "config": config, "timeoutSeconds": 30}
    body = quickstart(
        initializer={"command": ["python", "-c", MODEL + CLASSIFIER, "job://model", "job://liked"]},
        models=[*spec["models"], {"name": "liked", "source": "job://liked"}],
        training=spec["training"] | {"steps": 200, "promptsPerStep": 8},
        evaluation=None,
        tasks=[spec["tasks"][0] | {"moreRewards": [{"name": "liked", "weight": 0.1}]}],
        rewards=[*spec["rewards"], liked],
        rollouts=[*spec["rollouts"], {"name": "liked", "model": "liked", "maxModelLength": 128}],
    )
    body["metadata"]["name"] = "liked"
    return body


@pytest.mark.parametrize(
    ("body", "pool", "metric"),
    [(manifest(), "judge", "reward/clear"), (liked_manifest(), "liked", "reward/liked")],
    ids=["judge", "reward model"],
)
def test_a_job_trains_with_a_model_in_a_frozen_pool_whose_pod_is_deleted(
    node: Cluster, installed: Any, body: Object, pool: str, metric: str
) -> None:
    job = Job(node, node.namespace(body["metadata"]["name"], RESTRICTED), body)
    job.apply()
    job.reaches(1, START_SECONDS)
    job.until(lambda: job.status()["ready"]["rollout"] == "2/2", READY_SECONDS, "2 of 2 engines to be ready")
    before = job.pod(f"rollout-{pool}")["metadata"]["name"]
    job.kubectl("delete", "pod", before, "--wait=false")
    reached = job.step()
    [after] = job.has_pods(f"rollout-{pool}", 1, REPLACED_SECONDS)
    job.reaches(reached + 3, REPLACED_SECONDS)
    assert after["metadata"]["name"] != before
    assert job.ledger("SELECT reason FROM samples WHERE state = 'failed' LIMIT 3") == []
    asked = job.ledger(f"SELECT COUNT(*) AS n FROM scores WHERE metrics LIKE '%{metric}%'")
    assert asked[0]["n"] > 0
    if "referencePool" in body["spec"]["algorithm"]:
        [counts] = job.ledger(
            "SELECT (SELECT COUNT(*) FROM model_logprobs WHERE role = 'reference') AS known,"
            " (SELECT COUNT(*) FROM samples WHERE reward IS NOT NULL) AS scored"
        )
        assert counts["known"] == counts["scored"] > 0
    node.api.delete(f"/api/v1/namespaces/{job.namespace}")
