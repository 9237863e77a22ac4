"""The user of a job's pods: of the cluster's settings, or assigned by the cluster, as OpenShift does."""

import pytest

from rljob.api.load import validate
from rljob.manifests import render
from rljob.manifests.inputs import Cluster, RenderTarget

IDS = {"runAsUser", "runAsGroup", "fsGroup"}


def contexts(manifest, cluster):
    """Return the security contexts of all pods."""
    return [
        each["spec"]["template"]["spec"]["securityContext"]
        for role in render(validate(manifest), RenderTarget(cluster, uid="uid"))
        for each in role.objects
        if "template" in each.get("spec", {})
    ]


@pytest.mark.parametrize("user", [65532, 1_000_680_000])
def test_all_pods_have_the_user_of_the_settings(manifest, user):
    found = contexts(manifest, Cluster(user=user))
    assert len(found) == 6
    assert all({name: context[name] for name in IDS} == dict.fromkeys(IDS, user) for context in found)


def test_without_a_user_the_cluster_assigns_one_and_pods_stay_restricted(manifest):
    for context in contexts(manifest, Cluster(user=None)):
        assert not IDS & context.keys()
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_template_still_sets_a_user_of_its_own(manifest):
    manifest["spec"]["trainer"] = {"template": {"spec": {"securityContext": {"runAsUser": 1001}}}}
    assert {context.get("runAsUser") for context in contexts(manifest, Cluster(user=None))} == {None, 1001}
