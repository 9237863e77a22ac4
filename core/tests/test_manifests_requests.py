"""Requests of pods with GPUs: in proportion to their number, by the settings of the cluster."""

import pytest

from rljob import manifests
from rljob.api.models import RLJob
from rljob.manifests.inputs import RenderTarget, read_cluster

from .manifests import MANIFEST


def requests(cluster, role, **changes):
    """Return the requests of the main container of a role's first workload."""
    job = RLJob.model_validate({**MANIFEST, "spec": {**MANIFEST["spec"], **changes}})
    rendered = next(each for each in manifests.render(job, RenderTarget(cluster)) if each.kind == role)
    workload = next(each for each in rendered.objects if "template" in each.get("spec", {}))
    return workload["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"cpu": "16", "memory": "64Gi"}),
        ({"requestsPerGpu": {"cpu": "0.5", "memory": "80Gi"}}, {"cpu": "4", "memory": "640Gi"}),
        ({"accelerator": "cpu"}, {"cpu": "250m", "memory": "1Gi"}),
    ],
)
def test_a_pod_requests_cpu_and_memory_for_each_of_its_gpus(settings, expected):
    assert requests(read_cluster(settings), "trainer", trainer={"processesPerNode": 8}) == expected


def test_an_engine_requests_them_too_and_a_template_wins():
    main = {"name": "main", "resources": {"requests": {"memory": "600Gi"}}}
    pool = {"name": "main", "template": {"spec": {"containers": [main]}}}
    assert requests(read_cluster({}), "rollout") == {"cpu": "2", "memory": "8Gi"}
    assert requests(read_cluster({}), "rollout", rollouts=[pool]) == {"cpu": "2", "memory": "600Gi"}
