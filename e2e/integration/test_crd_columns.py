"""The output of kubectl for RLJobs and RLJobScales."""

from __future__ import annotations

import re

import pytest

from core.tests.crd_cases import changed
from rljob.api.job_status import RLJobStatus

API = "rljob.dev/v1alpha1"
STATUS = {
    "observedGeneration": 1,
    "release": "0.1.0",
    "conditions": [
        {
            "type": "Initialized",
            "status": "True",
            "reason": "InitializerSucceeded",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        },
        {
            "type": "Ready",
            "status": "False",
            "reason": "PodsPending",
            "message": "2 of 4 rollout-main pods pending: insufficient nvidia.com/gpu",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        },
    ],
    "roles": [{"name": "trainer", "desired": 2, "ready": 2, "restarts": 1}],
    "ready": {"trainer": "2/2", "rollout": "2/4", "reward": "1/1", "environment": "2/3", "restarts": "trainer 1"},
    "trainer": {"number": 2, "startedAt": "2026-01-01T00:00:00Z"},
    "run": {
        "state": "Running",
        "progress": {"step": 12, "steps": 50, "text": "12/50 24%"},
        "lastCheckpoint": {"step": 10, "path": "job://checkpoints/10"},
        "staleness": "0.8/1",
        "metrics": [
            {"name": "reward/mean", "value": 0.625},
            {"name": "seconds_per_step", "value": 9.5},
            {"name": "tokens_per_second", "value": 1234.56},
        ],
    },
}
NARROW = """
NAME   READY         STEP   PROGRESS    TRAINER   ROLLOUT   REWARD   STALENESS   AGE
sums   PodsPending   12     12/50 24%   2/2       2/4       1/1      0.8/1       NOW
"""
WIDE = """
NAME   READY         STEP   PROGRESS    TRAINER   ROLLOUT   REWARD   STALENESS   AGE   ENVIRONMENT   RUN       TOKENS/S   MEAN REWARD   CHECKPOINT   ATTEMPT   RESTARTS    MESSAGE
sums   PodsPending   12     12/50 24%   2/2       2/4       1/1      0.8/1       NOW   2/3           Running   1234       0.625         10           2         trainer 1   2 of 4 rollout-main pods pending: insufficient nvidia.com/gpu
"""  # noqa: E501
NEW = """
NAME   READY   STEP   PROGRESS   TRAINER   ROLLOUT   REWARD   STALENESS   AGE
sums                                                                      NOW
"""
SCALE = """
NAME                JOB    ROLE           DESIRED   PODS   AGE   MESSAGE
sums-rollout-main   sums   rollout-main   2         1      NOW
"""


def table(text):
    """Return the output of kubectl as rows of columns, with every age replaced by NOW."""
    lines = [re.sub(r"(?<=\s)\d+[smh]\b *", "NOW   ", line).rstrip() for line in text.strip().splitlines()]
    return [re.split(r" {2,}", re.sub(r"\bAGE +", "AGE   ", line)) for line in lines]


@pytest.fixture
def job(cluster, namespace):
    """Path of a job without a status."""
    cluster.api.post(cluster.api.path(API, "RLJob", namespace), changed(()))
    return cluster.api.path(API, "RLJob", namespace, "sums")


def written(cluster, job, status):
    body = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": "sums"}, "status": status}
    cluster.api.apply(f"{job}/status", body, "operator", fieldValidation="Strict")


def test_the_columns_show_why_a_job_does_not_run_and_its_progress(cluster, namespace, job):
    RLJobStatus.model_validate(STATUS, by_alias=True, by_name=False)
    written(cluster, job, STATUS)
    assert table(cluster.kubectl("get", "rlj", "-n", namespace)) == table(NARROW)


def test_the_wide_columns_show_throughput_and_restarts(cluster, namespace, job):
    written(cluster, job, STATUS)
    assert table(cluster.kubectl("get", "rlj", "-n", namespace, "-o", "wide")) == table(WIDE)


def test_a_job_without_a_status_has_empty_columns(cluster, namespace, job):
    assert table(cluster.kubectl("get", "rlj", "-n", namespace)) == table(NEW)


@pytest.mark.parametrize("name", ["rlj", "rl", "rljob", "rljobs.rljob.dev"])
def test_jobs_are_found_by_every_name(cluster, namespace, job, name):
    assert "sums" in cluster.kubectl("get", name, "-n", namespace)


def test_kubectl_explain_shows_the_descriptions_of_fields(cluster):
    assert "lowest policy version of any token" in " ".join(
        cluster.kubectl("explain", "rljob.spec.training.maxStaleness").split()
    )


def test_describe_shows_conditions_and_roles(cluster, namespace, job):
    written(cluster, job, STATUS)
    output = cluster.kubectl("describe", "rlj", "sums", "-n", namespace)
    assert "insufficient nvidia.com/gpu" in output
    assert "Restarts:" in output


def test_a_status_of_the_models_is_stored_unchanged(cluster, namespace, job):
    """Every field of the models is in the schema, and the API server adds no default."""
    written(cluster, job, STATUS)
    assert cluster.api.get(job)["status"] == STATUS


def test_a_role_is_scaled_with_kubectl_and_its_pods_are_counted_by_the_selector(cluster, namespace):
    name, path = "sums-rollout-main", cluster.api.path(API, "RLJobScale", namespace)
    body = {
        "apiVersion": API,
        "kind": "RLJobScale",
        "metadata": {"name": name},
        "spec": {"job": "sums", "role": "rollout-main", "replicas": 1},
    }
    cluster.api.post(path, body, fieldValidation="Strict")
    status = {"replicas": 1, "selector": "rljob.dev/job=sums,rljob.dev/role=rollout-main"}
    cluster.api.patch(f"{path}/{name}/status", {"status": status})
    cluster.kubectl("scale", "rljs", name, "--replicas=2", "-n", namespace)
    assert table(cluster.kubectl("get", "rljs", "-n", namespace)) == table(SCALE)
    scale = cluster.api.get(f"{path}/{name}/scale")
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, status)
