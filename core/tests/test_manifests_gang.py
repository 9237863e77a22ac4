"""What makes pods members of a gang, and the object that describes it."""

from __future__ import annotations

from typing import Any

import pytest

from core.tests.goldens import GANG_TARGET, JOB, PLACED, with_gang
from rljob.api.load import load
from rljob.manifests import problems, render
from rljob.manifests.accelerator_profiles import AcceleratorProfile
from rljob.manifests.inputs import Cluster, Flavor, RenderTarget
from rljob.manifests.names import DEMAND_HASH
from rljob.manifests.pod_requests import total_requests

PROVIDERS = ("none", "kubernetes", "volcano", "coscheduling", "kueue")
GROUP_NAME, TASK = "scheduling.k8s.io/group-name", "volcano.sh/task-spec"


def rendered(provider: str, target: RenderTarget = GANG_TARGET) -> dict[str, Any]:
    """Return kind/name → object."""
    found = (each for role in render(with_gang(provider), target) for each in role.objects)
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def templates(provider: str) -> dict[str, Any]:
    """Return name of a workload → its pod template."""
    return {
        name.partition("/")[2]: each["spec"]["template"]
        for name, each in rendered(provider).items()
        if "template" in each.get("spec", {})
    }


def membership(template: dict[str, Any]) -> bool:
    """Return whether a pod belongs to a group of any provider."""
    metadata, spec = template["metadata"], template["spec"]
    labelled = "scheduling.x-k8s.io/pod-group" in metadata["labels"] or GROUP_NAME in metadata["annotations"]
    return labelled or "schedulingGroup" in spec


@pytest.mark.parametrize("provider", ["kubernetes", "volcano", "coscheduling"])
def test_trainer_and_minimum_engines_are_members_and_all_others_are_not(provider: str) -> None:
    members = {name for name, template in templates(provider).items() if membership(template)}
    assert members == {"sums-trainer-1", "sums-rollout-main"}


@pytest.mark.parametrize("provider", ["none", "kueue"])
def test_without_a_pod_group_no_pod_is_a_member(provider: str) -> None:
    assert not any(map(membership, templates(provider).values()))


def test_all_pods_with_accelerators_have_the_scheduler_of_the_gang() -> None:
    """Two schedulers would give the same accelerators away."""
    for provider in ("volcano", "coscheduling"):
        found = {name for name, each in templates(provider).items() if each["spec"].get("schedulerName") == "gangs"}
        assert found == {"sums-trainer-1", "sums-rollout-main", "sums-rollout-main-elastic"}
    default = RenderTarget(Cluster(), "research")
    assert rendered("volcano", default)["Job/sums-trainer-1"]["spec"]["template"]["spec"]["schedulerName"] == "volcano"
    assert "schedulerName" not in rendered("coscheduling", default)["Job/sums-trainer-1"]["spec"]["template"]["spec"]


def test_elastic_engines_of_volcano_are_in_the_queue_of_the_job() -> None:
    annotations = templates("volcano")["sums-rollout-main-elastic"]["metadata"]["annotations"]
    assert annotations["scheduling.volcano.sh/queue-name"] == "research" and TASK not in annotations


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_a_template_says_to_schedulers_reaches_the_pods(provider: str) -> None:
    spec = templates(provider)["sums-trainer-1"]["spec"]
    assert {field: spec[field] for field in ("runtimeClassName", "resourceClaims", "topologySpreadConstraints")} == {
        field: PLACED["spec"][field] for field in ("runtimeClassName", "resourceClaims", "topologySpreadConstraints")
    }
    assert spec["tolerations"][0] == PLACED["spec"]["tolerations"][0] and spec["nodeSelector"]["disk"] == "large"
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]


def test_a_workload_of_kueue_has_the_pods_of_all_roles_without_flavors() -> None:
    found = rendered("kueue")
    sets = {each["name"]: each for each in found["Workload/sums-gang"]["spec"]["podSets"]}
    without = rendered("kueue", RenderTarget(GANG_TARGET.cluster, "research", GANG_TARGET.uid))
    for name, each in without.items():
        template = each.get("spec", {}).get("template")
        if template is not None:
            role = each["metadata"]["labels"]["rljob.dev/role"]
            assert sets[role]["template"]["spec"] == template["spec"], name
    assert sets["rollout-main"]["count"] == 2 and sets["trainer"]["count"] == 1


def test_a_flavor_adds_to_the_pods_of_its_role_alone() -> None:
    found = templates("kueue")
    assert found["sums-trainer-1"]["spec"]["nodeSelector"] == {"disk": "large", "pool": "h100"}
    assert {"key": "h100", "operator": "Exists", "effect": "NoSchedule"} in found["sums-trainer-1"]["spec"][
        "tolerations"
    ]
    assert "pool" not in found["sums-rollout-main"]["spec"].get("nodeSelector", {})


def test_a_flavor_that_contradicts_a_node_selector_is_an_error() -> None:
    target = RenderTarget(Cluster(), flavors={"trainer": Flavor({"disk": "small"})})
    with pytest.raises(ValueError, match="assigns nodes with disk=small, and the pod's nodeSelector demands large"):
        render(with_gang("kueue"), target)


def workload(*changes: str, target: RenderTarget = RenderTarget()) -> tuple[str, str]:
    """Return the hash of what a Workload demands as the user wrote it, and the hash of all of it."""
    role = render(load(JOB, ["spec.scheduling.gang={provider: kueue, queue: a}", *FIXED, *changes]), target)[0]
    return role.objects[0]["metadata"]["annotations"][DEMAND_HASH], role.hash


@pytest.mark.parametrize(
    "change",
    [
        "spec.trainer.processesPerNode=4",
        "spec.trainer.rdma={resource: rdma/hca}",
        "spec.trainer.accelerator.profile=h100",
        "spec.rollouts[0].replicas.min=3",
        "spec.rollouts[0].parallelism.tensor=2",
        "spec.scheduling.gang.queue=b",
        "spec.coordinator.template={spec: {containers: [{name: main, resources: {requests: {cpu: '4'}}}]}}",
        "spec.runner.template={spec: {initContainers: [{name: a, image: a, resources: {limits: {cpu: '4'}}}]}}",
        "spec.rewards[0].template={spec: {nodeSelector: {disk: large}}}",
        "spec.rewards[0].template={spec: {tolerations: [{operator: Exists}]}}",
        "spec.trainer.template={spec: {resourceClaims: [{name: gpus, resourceClaimName: a}]}}",
        "spec.trainer.template={spec: {containers: [{name: main, resources: {claims: [{name: gpus}]}}]}}",
        "spec.runner.template.spec={affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: []}}}",
        "spec.trainer.template={spec: {runtimeClassName: kata}}",
    ],
)
def test_what_a_workload_demands_follows_the_manifest(change: str) -> None:
    target = RenderTarget(Cluster(accelerator_profiles={"h100": AcceleratorProfile()}))
    assert workload(change, target=target)[0] != workload(target=target)[0]


@pytest.mark.parametrize(
    "change",
    [
        "spec.training.steps=99",
        "spec.checkpoints.keep=9",
        "spec.tracking.tensorboard=false",
        "spec.trainer.nccl={NCCL_DEBUG: INFO}",
        "spec.trainer.sharedMemory=9Gi",
        "spec.coordinator.template={spec: {containers: [{name: main, image: a, env: [{name: A, value: b}]}]}}",
        "spec.runner.template={metadata: {labels: {team: a}}, spec: {terminationGracePeriodSeconds: 9}}",
        "spec.rollouts[0].template={spec: {affinity: {podAntiAffinity: {}}, priorityClassName: high}}",
    ],
)
def test_what_a_workload_demands_does_not_depend_on_the_settings_of_the_run(change: str) -> None:
    assert workload(change)[0] == workload()[0]


def test_what_a_workload_demands_does_not_depend_on_the_cluster_and_the_workload_itself_does() -> None:
    requests = RenderTarget(Cluster(requests_per_gpu={"cpu": "9", "memory": "9Gi"}))
    image = RenderTarget(Cluster(images={**Cluster().images, "runner": "runner:2"}), attempt=7)
    demand, everything = workload()
    for target in (requests, image):
        found = workload(target=target)
        assert found[0] == demand and found[1] != everything
    ranked = "spec.scheduling.priorityClassName=high"
    first, second = (workload(ranked, target=RenderTarget(priority=each)) for each in (1, 2))
    assert first[0] == second[0] == demand and first[1] != second[1]


FIXED = ["spec.rewards[0].replicas.max=null", "spec.rollouts[0].replicas.max=null", "spec.runner.replicas.max=null"]


def test_the_provider_of_the_cluster_holds_for_jobs_that_name_none() -> None:
    job = load(JOB)
    assert render(job, RenderTarget(Cluster(gang="volcano")))[0].objects[0]["kind"] == "PodGroup"
    assert problems(job, Cluster(gang="volcano")) == []
    found = problems(job, Cluster(gang="kueue"))
    assert [problem.partition(":")[0] for problem in found] == [
        "spec.scheduling.gang.queue",
        "spec.scheduling.gang.provider",
    ]
    assert all("the cluster's gang provider is kueue" in problem for problem in found)
    queued = load(JOB, ["spec.scheduling.gang.queue=research"])
    assert "this provider has no queues" in problems(queued, Cluster())[0] and not problems(
        queued, Cluster(gang="volcano")
    )


def test_kueue_admits_a_limited_number_of_roles() -> None:
    many = [{"name": f"r{i}", "builtin": "reasoning_gym"} for i in range(15)]
    job = load(JOB, [f"spec.rewards={many}", "spec.scheduling.gang={provider: kueue, queue: a}", *FIXED[1:], *TASKS])
    assert "kueue admits at most 18 roles, and the job has 20" in problems(job, Cluster())[0]


TASKS = ["spec.tasks=[{name: sums, data: {reasoningGym: {dataset: chain_sum}}, reward: r0}]"]


def test_requests_of_pods_are_added_as_schedulers_count_them() -> None:
    def container(cpu: str, **fields: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **fields}

    spec = {
        "initContainers": [container("250m", restartPolicy="Always"), container("3")],
        "containers": [container("500m"), {"resources": {"limits": {"memory": "1Gi", "nvidia.com/gpu": "8"}}}],
        "overhead": {"cpu": "100m"},
    }
    small = {"containers": [container("1500m")]}
    assert total_requests([({"spec": spec}, 2), ({"spec": small}, 4)]) == {
        "cpu": "12.7",
        "memory": "2147483648",
        "nvidia.com/gpu": "16",
    }


@pytest.mark.parametrize("provider", ["kubernetes", "volcano", "coscheduling", "kueue"])
def test_every_host_of_an_engine_counts(provider: str) -> None:
    """A pool of two engines on two hosts, and the trainer's pod."""
    job = with_gang(provider).model_copy(deep=True)
    (pool,) = job.spec.rollouts
    pool.hosts, pool.parallelism.tensor = 2, 16
    target = GANG_TARGET if provider == "kueue" else RenderTarget(GANG_TARGET.cluster, "research", GANG_TARGET.uid)
    objects = [each for role in render(job, target) for each in role.objects]
    clusters = [each["spec"] for each in objects if each["kind"] == "RayCluster"]
    groups = [clusters[0]["headGroupSpec"], *clusters[0]["workerGroupSpecs"]]
    assert len(clusters) == 2 and len(groups) == 2
    assert all(membership(each["template"]) == (provider != "kueue") for each in groups)
    (spec,) = (each["spec"] for each in objects if each["metadata"]["name"] == "sums-gang")
    match provider:
        case "kubernetes":
            assert spec["schedulingPolicy"]["gang"]["minCount"] == 5
        case "coscheduling":
            assert spec["minMember"] == 5
        case "volcano":
            assert spec["minMember"] == 5 and spec["minTaskMember"] == {"trainer": 1, "rollout-main": 4}
            assert spec["minResources"]["nvidia.com/gpu"] == "34"
        case "kueue":
            (engines,) = (each for each in spec["podSets"] if each["name"] == "rollout-main")
            assert engines["count"] == 4
