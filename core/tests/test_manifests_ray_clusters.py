"""RayClusters: what KubeRay's contract needs, and what the pods of an engine may know."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from core.tests.manifests import MANIFEST
from rljob.api.load import override, validate
from rljob.manifests import problems, render
from rljob.manifests.inputs import Cluster, Object, RenderTarget
from rljob.manifests.render_context import RenderedRole

LONG = "a" + "b-" * 30 + "cd"
ACROSS = ("spec.rollouts[0].hosts=3", "spec.rollouts[0].parallelism={tensor: 4, pipeline: 6}")
LONGEST_NAME = 53
"""Of a RayCluster that KubeRay accepts."""


def job(*changes: str) -> Any:
    data = copy.deepcopy(MANIFEST)
    for change in (*ACROSS, *changes):
        override(data, change)
    return validate(data)


def pool(*changes: str, replicas: int | None = None, cluster: Cluster = Cluster()) -> RenderedRole:
    """Return the role of the first pool of the smallest job with some changes."""
    wanted = {} if replicas is None else {"rollout-main": replicas}
    roles = render(job(*changes), RenderTarget(cluster, "research", "uid", 1, wanted))
    return next(role for role in roles if role.kind == "rollout")


def clusters(role: RenderedRole) -> list[Object]:
    return [each for each in role.objects if each["kind"] == "RayCluster"]


def templates(cluster: Object) -> tuple[Object, Object]:
    """Return the templates of the head and of the workers."""
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    return cluster["spec"]["headGroupSpec"]["template"], workers["template"]


def main(template: Object) -> Object:
    return template["spec"]["containers"][0]


def variables(template: Object) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in main(template)["env"]}


def test_an_engine_has_a_head_and_the_other_hosts_as_workers() -> None:
    role = pool()
    (cluster,) = clusters(role)
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert {key: workers[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {
        "replicas": 2,
        "minReplicas": 2,
        "maxReplicas": 2,
    }
    head, worker = templates(cluster)
    for template in (head, worker):
        assert main(template)["name"] == "main", "KubeRay runs Ray in the first container"
        assert main(template)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert main(template)["resources"]["requests"] == {"cpu": "16", "memory": "64Gi"}
        assert {"livenessProbe", "readinessProbe"} <= main(template).keys(), "else KubeRay adds its own"
        assert any(each["mountPath"] == "/dev/shm" for each in main(template)["volumeMounts"])
        assert template["metadata"]["labels"]["rljob.dev/tier"] == "gang"
    assert main(head)["command"] == ["python", "-m", "rljob.rollout.main"]
    assert main(worker)["command"] == ["python", "-m", "rljob.rollout.main", "--worker"]
    assert (role.desired, role.hosts) == (1, 3)


def test_each_engine_has_a_ray_cluster_and_elastic_ones_another_tier() -> None:
    made = {
        each["metadata"]["name"]: each["metadata"]["labels"]["rljob.dev/tier"]
        for each in clusters(pool("spec.rollouts[0].replicas={min: 2, max: 4}", replicas=3))
    }
    assert made == {
        "sums-rollout-main-0": "gang",
        "sums-rollout-main-1": "gang",
        "sums-rollout-main-elastic-0": "elastic",
    }


def test_ray_has_the_gpus_of_a_host_and_serves_nothing_outside_the_pod() -> None:
    (cluster,) = clusters(pool())
    head = cluster["spec"]["headGroupSpec"]["rayStartParams"]
    worker = cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]
    for parameters in (head, worker):
        assert all(isinstance(value, str) for value in parameters.values())
        assert (parameters["num-gpus"], parameters["num-cpus"]) == ("8", "8")
    assert (head["include-dashboard"], head["dashboard-host"]) == ("false", "127.0.0.1")


def test_only_the_head_knows_the_token_of_agents_and_all_hosts_that_of_ray() -> None:
    head, worker = templates(*clusters(pool()))
    given = []
    for template in (head, worker):
        assert variables(template)["RAY_AUTH_MODE"] == "token"
        assert variables(template)["RAY_AUTH_TOKEN_PATH"] == "/etc/rljob/token/ray-token"
        (secret,) = [each["secret"] for each in template["spec"]["volumes"] if "secret" in each]
        given.append({each["key"] for each in secret["items"]})
    assert given == [{"agent", "ray"}, {"ray"}]
    assert "RLJOB_TOKEN_FILE" not in variables(worker)
    others = [role for role in render(job(), RenderTarget(uid="uid")) if role.kind != "rollout"]
    assert "ray-token" not in str(others), "code of a user runs in other pods"


def test_the_service_of_the_head_finds_it_and_has_different_ports() -> None:
    data = copy.deepcopy(MANIFEST)
    for change in (*ACROSS, "spec.models=[{name: policy, source: 'job://m'}, {name: judge, source: 'job://j'}]"):
        override(data, change)
    data["spec"]["rollouts"][0]["model"] = "judge"
    data["spec"]["rollouts"].append({"name": "policy"})
    roles = {role.name: role for role in render(validate(data), RenderTarget(uid="uid"))}
    role = roles["rollout-main"]
    head, worker = templates(*clusters(role))
    ports = [each["containerPort"] for each in main(head)["ports"]]
    names = [each["name"] for each in main(head)["ports"]]
    assert names == ["http", "gcs-server", "metrics"] and len(set(ports)) == 3
    assert [each["name"] for each in main(worker)["ports"]] == ["metrics"]
    assert "app.kubernetes.io/name" not in head["metadata"]["labels"], "the Service selects by KubeRay's"
    selectors = [each["spec"]["selector"] for each in role.objects if each["kind"] == "Service"]
    assert all(each["ray.io/node-type"] == "head" for each in selectors) and len(selectors) == 2


def test_only_the_trainer_and_its_own_pool_connect_to_the_hosts_of_an_engine() -> None:
    def policies(*changes: str) -> dict[str, Object]:
        roles = render(job(*changes), RenderTarget(uid="uid"))
        (network,) = [role for role in roles if role.kind == "network"]
        return {each["metadata"]["name"]: each["spec"] for each in network.objects}

    def roles_of(rule: Object) -> list[str]:
        return [each["podSelector"]["matchLabels"].get("rljob.dev/role", "") for each in rule["from"]]

    made = policies()
    (all_pods,) = made["sums-network-pods"]["podSelector"]["matchExpressions"]
    assert (all_pods["operator"], all_pods["values"]) == ("NotIn", ["rollout-main"]), (
        "a pod may do what any policy allows"
    )
    hosts = made["sums-network-rollout-main"]
    assert hosts["podSelector"]["matchLabels"]["rljob.dev/role"] == "rollout-main"
    assert [roles_of(rule) for rule in hosts["ingress"]] == [["rollout-main", "trainer"]]
    assert hosts["policyTypes"] == ["Ingress"]
    listed = policies("spec.network.egress={policy: Listed}")["sums-network-rollout-main"]
    assert listed["policyTypes"] == ["Ingress", "Egress"]
    models = "spec.models=[{name: policy, source: 'job://m'}, {name: judge, source: 'job://j'}]"
    pools = "[{name: policy}, {name: judge, model: judge, hosts: 2, parallelism: {tensor: 2}}]"
    data = copy.deepcopy(MANIFEST)
    for change in (models, f"spec.rollouts={pools}"):
        override(data, change)
    (network,) = [role for role in render(validate(data), RenderTarget(uid="uid")) if role.kind == "network"]
    (judge,) = [each["spec"] for each in network.objects if each["metadata"]["name"] == "sums-network-rollout-judge"]
    assert [roles_of(rule) for rule in judge["ingress"]] == [["rollout-judge"], [""]]
    assert judge["ingress"][1]["ports"] == [{"port": 8080, "protocol": "TCP"}]


@pytest.mark.parametrize("engines", [1, 3])
def test_a_disruption_budget_lets_one_pod_go(engines: int) -> None:
    role = pool("spec.rollouts[0].replicas={min: 1, max: 4}", replicas=engines)
    (budget,) = [each for each in role.objects if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["minAvailable"] == 3 * engines - 1
    assert "maxUnavailable" not in budget["spec"], "Kubernetes does not know the desired pods of a RayCluster"


def test_a_change_of_the_replicas_changes_the_budget_and_no_ray_cluster() -> None:
    one, more = (pool("spec.rollouts[0].replicas={min: 1, max: 4}", replicas=count) for count in (1, 3))

    def hashes(role: RenderedRole, kind: str) -> list[str]:
        found = [each for each in role.objects if each["kind"] == kind]
        return [each["metadata"]["annotations"]["rljob.dev/role-hash"] for each in found]

    assert hashes(one, "PodDisruptionBudget") != hashes(more, "PodDisruptionBudget")
    assert set(hashes(one, "RayCluster")) == set(hashes(more, "RayCluster"))


def test_names_are_those_that_kuberay_accepts() -> None:
    data = copy.deepcopy(MANIFEST)
    override(data, f"metadata.name={LONG}")
    data["spec"]["rollouts"] = [
        {"name": f"{LONG[:-1]}{i}", "hosts": 2, "parallelism": {"tensor": 2}, "replicas": {"min": 12, "max": 14}}
        for i in range(2)
    ]
    rendered = render(validate(data), RenderTarget(uid="uid"))
    names = [each["metadata"]["name"] for role in rendered for each in clusters(role)]
    assert len(set(names)) == len(names) == 24
    assert all(len(name) <= LONGEST_NAME and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)


def test_the_template_of_the_pool_applies_to_all_its_pods() -> None:
    template = (
        "{spec: {nodeSelector: {gpu: h200}, containers: [{name: main, env: [{name: A, value: b}]}, {name: log}]}}"
    )
    for each in templates(*clusters(pool(f"spec.rollouts[0].template={template}"))):
        assert each["spec"]["nodeSelector"] == {"gpu": "h200"}
        assert variables(each)["A"] == "b"
        assert [container["name"] for container in each["spec"]["containers"]] == ["main", "log"]


@pytest.mark.parametrize("field", ["command", "args"])
def test_a_template_must_not_replace_the_commands(field: str) -> None:
    template = f"{{spec: {{containers: [{{name: main, {field}: [sleep]}}]}}}}"
    changed = job(f"spec.rollouts[0].template={template}")
    (problem,) = problems(changed)
    assert problem.startswith(
        f"spec.rollouts[0].template: {field} of container main would replace the different commands"
    )


def test_a_cluster_without_gpus_is_refused() -> None:
    assert problems(job(), Cluster()) == []
    (problem,) = problems(job(), Cluster(accelerator="cpu"))
    assert problem.startswith("spec.rollouts[0].hosts: vLLM on a CPU does not support Ray")
    assert problems(job("spec.rollouts[0].accelerator.kind=nvidia"), Cluster(accelerator="cpu")) == []
