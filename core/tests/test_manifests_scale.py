"""The objects that change the replicas of a role: RLJobScale, and a ScaledObject of KEDA on request."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from core.tests.manifests import MANIFEST
from rljob.api.load import override, validate
from rljob.manifests import render
from rljob.manifests.inputs import Cluster, RenderTarget
from rljob.manifests.names import ROLE_HASH

KEDA = "{provider: keda, keda: {serverAddress: 'http://prometheus:9090'}}"
RANGE = "{min: 1, max: 4}"


def objects(kind: str, *changes: str) -> dict[str, Any]:
    """Return name → object of a kind of the smallest job with some changes."""
    data = copy.deepcopy(MANIFEST)
    for change in changes:
        override(data, change)
    target = RenderTarget(Cluster(), "research", "uid", 1, {})
    found = [each for role in render(validate(data), target) for each in role.objects]
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def scaled(*changes: str) -> dict[str, Any]:
    return objects("ScaledObject", f"spec.rewards[0].replicas={RANGE}", f"spec.rewards[0].autoscaling={KEDA}", *changes)


@pytest.mark.parametrize("change", [f"spec.rewards[0].autoscaling={KEDA}", f"spec.rewards[0].replicas={RANGE}"])
def test_a_scaled_object_needs_a_range_and_a_request(change: str) -> None:
    assert objects("ScaledObject", change) == {}


def test_a_scaled_object_writes_the_scale_of_the_role_by_the_load_of_the_coordinator() -> None:
    made = scaled("spec.rewards[0].processes=2", "spec.rewards[0].autoscaling.scaleOutSeconds=15")["sums-reward-exact"]
    assert "sums-reward-exact" in objects("RLJobScale", f"spec.rewards[0].replicas={RANGE}")
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid"
    query = 'max(rljob_role_load{namespace="research",pod="sums-coordinator-0",role="reward-exact"})'
    assert made["spec"] == {
        "scaleTargetRef": {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJobScale", "name": "sums-reward-exact"},
        "minReplicaCount": 1,
        "maxReplicaCount": 4,
        "pollingInterval": 15,
        "cooldownPeriod": 300,
        "advanced": {
            "horizontalPodAutoscalerConfig": {
                "behavior": {
                    "scaleUp": {"stabilizationWindowSeconds": 15},
                    "scaleDown": {"stabilizationWindowSeconds": 300},
                }
            }
        },
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "AverageValue",
                "metadata": {"serverAddress": "http://prometheus:9090", "query": query, "threshold": "16"},
            }
        ],
    }


def test_a_query_of_the_user_replaces_the_default() -> None:
    made = scaled("spec.rewards[0].autoscaling.keda.query=sum(up)")["sums-reward-exact"]
    assert made["spec"]["triggers"][0]["metadata"]["query"] == "sum(up)"


@pytest.mark.parametrize(
    ("role", "changes", "threshold"),
    [
        ("runner", (f"spec.runner.replicas={RANGE}", f"spec.runner.autoscaling={KEDA}"), "1024"),
        ("rollout-main", (f"spec.rollouts[0].replicas={RANGE}", f"spec.rollouts[0].autoscaling={KEDA}"), "1"),
        (
            "environment-lake",
            (f"spec.environments=[{{name: lake, builtin: frozen_lake, replicas: {RANGE}, autoscaling: {KEDA}}}]",),
            "256",
        ),
    ],
)
def test_every_role_with_a_range_may_have_one(role: str, changes: tuple[str, ...], threshold: str) -> None:
    made = objects("ScaledObject", *changes)[f"sums-{role}"]
    assert made["spec"]["triggers"][0]["metadata"]["threshold"] == threshold


def test_a_change_of_its_fields_changes_its_hash_and_no_pod() -> None:
    before, after = (scaled(f"spec.rewards[0].autoscaling.scaleInSeconds={n}")["sums-reward-exact"] for n in (60, 90))
    assert before["metadata"]["annotations"][ROLE_HASH] != after["metadata"]["annotations"][ROLE_HASH]
    pods = [objects("Deployment", f"spec.rewards[0].autoscaling.scaleInSeconds={n}") for n in (60, 90)]
    assert pods[0] == pods[1]


def test_a_service_may_have_no_pod() -> None:
    change = "spec.rewards[0].replicas={min: 0, max: 4}"
    assert objects("Deployment", change)["sums-reward-exact"]["spec"]["replicas"] == 0
    assert objects("RLJobScale", change)["sums-reward-exact"]["spec"]["replicas"] == 0
