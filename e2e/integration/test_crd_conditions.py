"""Conditions of other controllers in the status of an RLJob: stored, and kept when the operator applies its own."""

from __future__ import annotations

import pytest

from core.tests.crd_cases import changed
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

API = "rljob.dev/v1alpha1"


def condition(kind: str) -> dict[str, str]:
    time = "2026-11-23T12:00:00Z"
    return {"type": kind, "status": "True", "reason": "Admitted", "message": "", "lastTransitionTime": time}


def test_two_controllers_own_conditions_of_their_own(cluster: ControlPlane, namespace: str):
    path = cluster.api.path(API, "RLJob", namespace)
    cluster.api.post(path, changed(("metadata.name=sums",)))

    def apply(manager: str, *kinds: str) -> list[str]:
        body = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": "sums"}}
        body["status"] = {"conditions": [condition(kind) for kind in kinds]}
        found = cluster.api.apply(f"{path}/sums/status", body, manager)
        return sorted(each["type"] for each in found["status"]["conditions"])

    apply("rljob-operator", "Ready", "Initialized")
    assert apply("kueue", "kueue.x-k8s.io/QuotaReserved") == ["Initialized", "Ready", "kueue.x-k8s.io/QuotaReserved"]
    assert apply("rljob-operator", "Ready", "NewOfALaterRelease") == [
        "NewOfALaterRelease",
        "Ready",
        "kueue.x-k8s.io/QuotaReserved",
    ]
    with pytest.raises(ApiError, match=r"status\.conditions\[2\]\.type"):
        apply("kueue", "not a type")
