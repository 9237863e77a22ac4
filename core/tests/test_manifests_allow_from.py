"""Pods that may read the coordinator: those of the cluster's settings, and those of the job."""

from rljob.api.kubernetes import Peer
from rljob.api.load import validate
from rljob.manifests import render
from rljob.manifests.inputs import Cluster, RenderTarget

PROMETHEUS = Cluster(allow_from=(Peer(name="prometheus", namespace_labels={"name": "monitoring"}),))


def ingress(manifest, cluster):
    """Return the rules of the coordinator's additional policy."""
    roles = {role.name: role for role in render(validate(manifest), RenderTarget(cluster, uid="uid"))}
    found = {each["metadata"]["name"]: each for each in roles["network"].objects}
    return found["sums-network-coordinator"]["spec"]["ingress"] if "sums-network-coordinator" in found else None


def test_prometheus_of_the_cluster_reads_every_coordinator(manifest):
    assert ingress(manifest, Cluster()) is None
    (rule,) = ingress(manifest, PROMETHEUS)
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]


def test_the_pods_of_the_job_are_added(manifest):
    manifest["spec"]["network"] = {"allowFrom": [{"name": "me", "podLabels": {"app": "me"}}]}
    (rule,) = ingress(manifest, PROMETHEUS)
    assert rule["from"] == [
        {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}},
        {"podSelector": {"matchLabels": {"app": "me"}}},
    ]


def test_without_network_policies_there_is_none(manifest):
    manifest["spec"]["network"] = {"policy": "Disabled"}
    assert ingress(manifest, PROMETHEUS) is None


def test_prometheus_of_the_cluster_reads_the_metrics_of_rewards_and_environments_inside_the_job(manifest):
    manifest["spec"]["rewards"].append({"name": "far", "url": "https://scores.example.com"})
    manifest["spec"]["environments"] = [{"name": "lake", "builtin": "frozen_lake"}]

    def policies(cluster):
        roles = {role.name: role for role in render(validate(manifest), RenderTarget(cluster, uid="uid"))}
        return {each["metadata"]["name"]: each["spec"] for each in roles["network"].objects}

    assert "sums-network-metrics" not in policies(Cluster())
    spec = policies(PROMETHEUS)["sums-network-metrics"]
    (rule,) = spec["podSelector"]["matchExpressions"]
    assert (rule["key"], rule["values"]) == ("rljob.dev/role", ["environment-lake", "reward-exact"])
    assert spec["ingress"] == [
        {
            "from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "ports": [{"port": 8080, "protocol": "TCP"}],
        }
    ]
