"""The API server accepts all rendered objects strictly, also from kubectl and in a namespace with restricted pods."""

from __future__ import annotations

import dataclasses

import pytest

from core.tests.goldens import CONTEXTS, JOB
from rljob.api.load import load, validate
from rljob.api.models import RLJob
from rljob.api.yaml_loader import read_yaml
from rljob.manifests import ALL_TOKENS, TOKEN_ROLES, render, secret
from rljob.manifests.inputs import Object, RenderTarget
from rljob.manifests.render import to_yaml
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

PRIORITY = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "research"}, "value": 1}
LONG = "a" + "b-" * 30 + "cd"
MAZE = "{name: maze, template: {spec: {containers: [{name: main, image: maze}]}}}"
ACTING = f"spec.environments=[{{name: lake, builtin: frozen_lake, replicas: {{max: 2}}}}, {MAZE}]"
"""An environment of rljob and one of the user's own."""
CHECKED = {"dryRun": "All", "fieldValidation": "Strict"}


@pytest.fixture
def restricted(cluster: ControlPlane, namespace: str) -> str:
    """A namespace that admits only restricted pods, with the PriorityClass to which the job's pods refer."""
    cluster.api.patch(
        f"/api/v1/namespaces/{namespace}",
        {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
    )
    cluster.api.apply("/apis/scheduling.k8s.io/v1/priorityclasses/research", PRIORITY)
    return namespace


def jobs() -> dict[str, RLJob]:
    """Return jobs that together set fields of every role, and one with the longest names."""
    long = {"replicas": {"max": 2}}
    written = (
        f"metadata.name={LONG}",
        f"spec.rollouts={[{'name': LONG, **long}]}",
        f"spec.rewards[gym].name={LONG}",
        f"spec.tasks[sums].reward={LONG}",
    )
    bare = ("spec.network.egress.policy=Any", "spec.network.egress.to=[]", "spec.storage={claim: mine}")
    return {
        "golden": load(JOB),
        "long": load(JOB, written),
        "acting": load(JOB, [ACTING]),
        "another": load(JOB, (*bare, "spec.trainer.nodes=4", "spec.trainer.accelerator.kind=cpu")),
    }


def rendered(job: RLJob, context: RenderTarget, namespace: str) -> list[Object]:
    """Return the job's objects, including its Secret."""
    here = dataclasses.replace(context, namespace=namespace)
    tokens = secret(job, here, dict.fromkeys((*TOKEN_ROLES, ALL_TOKENS), "token"))
    return [tokens, *(made for role in render(job, here) for made in role.objects)]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", jobs())
def test_every_object_is_accepted_strictly_and_without_a_warning(cluster, namespace, name, context):
    api = cluster.api
    api.warnings.clear()
    for made in rendered(jobs()[name], CONTEXTS[context], namespace):
        collection = api.path(made["apiVersion"], made["kind"], namespace)
        api.post(collection, made, **CHECKED)
        api.apply(f"{collection}/{made['metadata']['name']}", made, **CHECKED)
    assert api.warnings == []


def test_an_unknown_field_is_rejected(cluster, namespace):
    [config] = [made for made in rendered(load(JOB), RenderTarget(), namespace) if made["kind"] == "ConfigMap"]
    with pytest.raises(ApiError, match="strict decoding error"):
        cluster.api.post(cluster.api.path("v1", "ConfigMap", namespace), config | {"dta": {}}, **CHECKED)


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_pod_is_admitted_where_pods_must_be_restricted(cluster, restricted, context):
    objects = rendered(load(JOB, [ACTING]), CONTEXTS[context], restricted)
    [account] = [made for made in objects if made["kind"] == "ServiceAccount"]
    account["metadata"].pop("ownerReferences", None)  # otherwise the garbage collector deletes it
    cluster.api.create(account)
    templates = [made["spec"]["template"] for made in objects if "template" in made.get("spec", {})]
    # initializer, coordinator, two rewards, two environments, runner, trainer, gang and elastic engines
    assert len(templates) == 10
    for i, template in enumerate(templates):
        metadata = {**template["metadata"], "name": f"pod-{i}"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        cluster.api.post(cluster.api.path("v1", "Pod", restricted), pod, **CHECKED)


def test_a_pod_that_is_not_restricted_is_refused_there(cluster, restricted):
    job = load(JOB, ["spec.runner.template={spec: {securityContext: {runAsNonRoot: null, seccompProfile: null}}}"])
    [deployment] = [
        made
        for made in rendered(job, RenderTarget(), restricted)
        if made["kind"] == "Deployment" and made["metadata"]["name"] == "sums-runner"
    ]
    template = deployment["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runner"}, "spec": template["spec"]}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        cluster.api.post(cluster.api.path("v1", "Pod", restricted), pod, **CHECKED)


def test_kubectl_accepts_the_rendered_yaml(cluster, namespace):
    objects = rendered(load(JOB), RenderTarget(), namespace)
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=to_yaml(objects))


def test_the_api_server_stores_objects_as_rendered(cluster, namespace):
    """A stored object has every rendered value; otherwise the operator would overwrite the API server's defaults."""
    for made in rendered(load(JOB), CONTEXTS["gpu"], namespace):
        collection = cluster.api.path(made["apiVersion"], made["kind"], namespace)
        stored = cluster.api.post(collection, made, **CHECKED)
        if made["kind"] != "Secret":  # stringData is never read back
            assert _differing(made, stored, made["kind"]) == []


def _differing(expected, stored, path):
    """Return the paths at which ``stored`` differs from ``expected``."""
    if isinstance(expected, dict):
        if not expected:
            return [] if stored in ({}, None) else [path]
        if not isinstance(stored, dict):
            return [path]
        return [found for key in expected for found in _differing(expected[key], stored.get(key), f"{path}.{key}")]
    if isinstance(expected, list) and isinstance(stored, list) and len(expected) == len(stored):
        return [
            found
            for i, (a, b) in enumerate(zip(expected, stored, strict=True))
            for found in _differing(a, b, f"{path}[{i}]")
        ]
    return [] if expected == stored else [f"{path}: {expected!r} is stored as {stored!r}"]


def test_the_coordinators_account_may_read_its_own_job_and_write_its_status_and_nothing_else(cluster, namespace):
    for name in ("sums", "other"):
        data = read_yaml(JOB.read_text())
        data["metadata"] = {"name": name, "namespace": namespace}
        cluster.api.create(data)
    for made in rendered(load(JOB), RenderTarget(), namespace):
        if made["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            cluster.api.create(made)
    own = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace, "sums")
    other = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace, "other")
    collection = own.removesuffix("/sums")
    identity = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}}
    api = cluster.client(cluster.service_account_token(namespace, "sums-coordinator"))
    cluster.wait_allowed(f"{namespace}:sums-coordinator", namespace, "patch", "rljobs/status", "rljob.dev", "sums")
    assert api.get(own)["metadata"]["name"] == "sums"
    assert len(api.list(collection, fieldSelector="metadata.name=sums")) == 1
    api.apply(f"{own}/status", identity | {"status": {"run": {"state": "Running"}}}, manager="rljob-coordinator")
    forbidden = {
        "another job": lambda: api.get(other),
        "all jobs": lambda: api.list(collection),
        "its spec": lambda: api.patch(own, {"spec": {"suspend": True}}),
        "another's status": lambda: api.patch(f"{other}/status", {"status": {"run": {"state": "Failed"}}}),
        "secrets": lambda: api.list(f"/api/v1/namespaces/{namespace}/secrets"),
        "pods": lambda: api.list(f"/api/v1/namespaces/{namespace}/pods"),
    }
    for what, attempt in forbidden.items():
        with pytest.raises(ApiError) as caught:
            attempt()
        assert caught.value.code == 403, what


def test_a_job_read_back_from_the_api_server_is_rendered_as_its_file(cluster, namespace):
    """Defaults that the API server sets do not count as set by the user: they change no hash and no object."""
    data = read_yaml(JOB.read_text())
    data["spec"]["training"]["maxStaleness"] = 1  # the default value, set explicitly
    cluster.api.create(data | {"metadata": {"name": "sums", "namespace": namespace}})
    stored = cluster.api.get(cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace, "sums"))
    assert stored["spec"] != read_yaml(JOB.read_text())["spec"]
    job = validate(stored | {"metadata": {"name": "sums"}})
    assert render(job, CONTEXTS["gpu"]) == render(load(JOB), CONTEXTS["gpu"])
