"""Engines that span hosts: made, drained, and replaced as a whole when one of their pods ends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rljob.manifests.names import RAY_CLUSTER
from rljob.operator.api_types import Pod
from rljob.operator.planning.ray_engines import PARTIAL_SECONDS
from rljob.operator.planning.role_status import LATE_SECONDS
from rljob.operator.planning.timestamps import instant
from rljob.operator.planning.trainer import QUICK_END_SECONDS

from .world import World, put

POOL = "rollout-main"
ACROSS = {"name": "main", "hosts": 2, "parallelism": {"tensor": 16}}
GANG = ["sums-rollout-main-0", "sums-rollout-main-1"]
FULL = "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."
ELASTIC = ["sums-rollout-main-elastic-0", "sums-rollout-main-elastic-1"]


def pool(**replicas: int) -> list[dict[str, Any]]:
    return [{**ACROSS, "replicas": {"min": 2, "max": 4, **replicas}}]


def running(scale: int = 2, **spec: Any) -> World:
    """Return a job whose engines are all ready, for an hour."""
    world = World(rollouts=pool(), **spec)
    world.run_up()
    if scale != 2:
        world.scale(POOL, scale)
        recover(world)
    world.provisioned()
    world.now += 3600
    world.settle()
    return world


def recover(world: World) -> None:
    """Have KubeRay make the pods that are missing, and all become ready."""
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()


def clusters(world: World) -> list[str]:
    return world.names("RayCluster")


def uids(world: World) -> dict[str, str]:
    return {name: child.metadata.uid for (kind, name), child in world.children.items() if kind == "RayCluster"}


def pods_of(world: World, cluster: str) -> list[Pod]:
    return [pod for pod in world.find() if pod.metadata.labels.get("ray.io/cluster") == cluster]


def report(world: World, **loads: int) -> None:
    """Have the coordinator report the engines, by the name of their head pod; -1: drained."""
    heads = [pod for pod in world.find() if pod.metadata.labels.get("ray.io/node-type") == "head"]
    engines = []
    for pod in heads:
        load = loads.get(pod.metadata.labels["ray.io/cluster"].removeprefix("sums-rollout-main-").replace("-", "_"), 5)
        engines.append({"name": pod.metadata.name, "load": max(0, load), "drained": load < 0})
    world.tell(state="Running", engines=engines)


# --- making and status ------------------------------------------------------------------------------------------------


def test_a_pool_has_a_ray_cluster_for_each_engine() -> None:
    world = running(4)
    assert clusters(world) == [*GANG, *ELASTIC]
    assert world.names("Deployment") == ["sums-reward-exact", "sums-runner"]
    tiers = [world.children["RayCluster", name].metadata.labels["rljob.dev/tier"] for name in clusters(world)]
    assert tiers == ["gang", "gang", "elastic", "elastic"]


def test_a_foreign_ray_cluster_keeps_its_name_and_blocks_nothing() -> None:
    world = World(rollouts=pool())
    world.foreign[RAY_CLUSTER, GANG[0]] = "a RayCluster that is not the job's has the name"
    world.run_up()
    assert clusters(world) == ["sums-rollout-main-1", "sums-rollout-main-2"]
    assert world.why != "NameConflict"


def test_no_engine_is_made_while_a_foreign_object_blocks_the_job() -> None:
    world = World(rollouts=pool(), scheduling={"gang": {"provider": "kubernetes"}})
    world.foreign["Service", "sums-coordinator"] = "a Service that is not the job's has the name"
    world.run_up()
    assert clusters(world) == [] and world.why == "NameConflict"


def test_engines_are_made_when_the_trainer_has_its_nodes() -> None:
    world = World(rollouts=pool())
    world.settle()
    assert clusters(world) == []
    world.make_pods()
    world.ready("trainer")
    world.settle()
    assert clusters(world) == GANG


def test_the_status_counts_engines_and_an_engine_is_ready_with_all_its_pods() -> None:
    world = World(rollouts=pool())
    world.settle()
    for _ in range(2):
        world.make_pods()
        world.ready("trainer", "exact", "runner", "coordinator", "head", "main-0-worker")
        world.settle()
    role = world.role(POOL)
    assert (role.desired, role.ready) == (2, 1)
    assert world.status.ready.rollout == "1/2"
    assert role.summary == "1 of 4 rollout-main pods starting: containers are being created"
    world.ready()
    world.settle()
    assert (world.role(POOL).ready, world.role(POOL).summary) == (2, "")


def test_a_pending_worker_makes_the_gang_wait() -> None:
    world = World(rollouts=pool(), failurePolicy={"pendingSeconds": 60})
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()
    world.make_pods()
    world.ready("head")
    world.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "main-1-worker")
    world.settle()
    assert world.why == "PodsPending"
    message = world.condition("Ready")[2]
    assert message.startswith("1 of 4 rollout-main pods pending: insufficient nvidia.com/gpu")
    assert world.status.pending_since == instant(world.now)
    world.now += 61
    world.settle()
    assert world.condition("Failed")[1] == "PendingTimeout"
    assert clusters(world) == []


def test_a_cluster_without_kuberay_is_reported() -> None:
    world = World(rollouts=pool())
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()
    message = "the cluster has no type RayCluster; install KubeRay"
    world.refused = {("RayCluster", name): message for name in GANG}
    world.settle()
    assert world.condition("Ready")[1] == "APIRejected"
    assert world.condition("Ready")[2].startswith(f"RayCluster sums-rollout-main-0 cannot be made: {message}")


def test_an_operator_of_kuberay_that_does_nothing_is_reported() -> None:
    world = World(rollouts=pool())
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()
    made = world.settle()
    assert world.role(POOL).summary == "4 of 4 rollout-main pods not created yet"
    assert made.after == LATE_SECONDS
    world.now += LATE_SECONDS
    world.settle()
    assert "KubeRay has made no pods for RayCluster sums-rollout-main-0; check" in world.role(POOL).summary


def test_a_refusal_of_a_pod_that_kuberay_reports_is_reported() -> None:
    world = World(rollouts=pool())
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()
    said = {"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: exceeded quota: gpus'}
    world.children["RayCluster", GANG[0]].body["status"] = {"conditions": [said]}
    world.settle()
    assert world.why == "QuotaExceeded"


# --- the end of a pod -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", ["main-0-head", "main-0-worker"])
def test_an_exit_of_any_pod_replaces_the_whole_engine_after_a_back_off(pod: str) -> None:
    world = running()
    before = uids(world)
    world.exit(pod, 1, message="CUDA error", fatal=False)
    made = world.settle()
    assert uids(world) == before, "the first back-off is one second"
    assert made.after == 1
    assert world.role(POOL).ready == 1, "the rest of the engine cannot work"
    assert world.role(POOL).summary.startswith(
        "an engine of rollout-main has ended and is replaced: pod sums-rollout-ma"
    )
    assert world.role(POOL).summary.endswith("exit code 1: CUDA error")
    world.now += 1
    world.settle()
    assert clusters(world) == ["sums-rollout-main-1", "sums-rollout-main-2"], "its name is not used again yet"
    assert pods_of(world, GANG[0]) == []
    assert ("Warning", "EngineReplaced") in world.events
    recover(world)
    assert world.role(POOL).ready == 2
    assert world.role(POOL).restarts == 1


def test_the_message_of_an_engine_that_is_replaced_names_pod_and_cause() -> None:
    world = running()
    world.exit("main-0-worker", 1, message="boom", fatal=False)
    world.now += 1
    (event,) = [each for each in world.plan().events if each.reason == "EngineReplaced"]
    name = pods_of(world, GANG[0])
    assert not name
    assert event.message.startswith("RayCluster sums-rollout-main-0 is replaced with all its pods: pod sums-rollout-ma")
    assert event.message.endswith("exit code 1: boom")


def test_exits_of_successors_are_counted_and_backed_off_until_the_run_fails() -> None:
    world = running(failurePolicy={"maxRestarts": 3})
    waits = []
    for _ in range(3):
        name = min(name for name in clusters(world) if name != GANG[1])
        world.exit(f"{name}-worker", 1, fatal=False)
        made = world.settle()
        waits.append(made.after)
        assert made.after is not None
        world.now += made.after
        recover(world)
    assert waits == [1, 2, 4]
    successor = next(name for name in clusters(world) if name != GANG[1])
    assert world.children["RayCluster", successor].metadata.annotations["rljob.dev/restarts"] == "3"
    world.exit(f"{successor}-head", 1, fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"
    assert clusters(world) == []


def test_work_offsets_restarts() -> None:
    world = running()
    world.children["RayCluster", GANG[0]].metadata.annotations["rljob.dev/restarts"] = "6"
    for pod in pods_of(world, GANG[0]):
        put(pod.status.conditions[0], last_transition_time=instant(world.now - 6000))
    world.exit("main-0-worker", 1, fatal=False)
    world.now += 1
    world.settle()
    annotations = world.children["RayCluster", "sums-rollout-main-2"].metadata.annotations
    assert annotations["rljob.dev/restarts"] == "1"


@pytest.mark.parametrize("text", ["many", "-3", "nan", "1e99"])
def test_an_annotation_that_another_client_wrote_breaks_nothing(text: str) -> None:
    world = running()
    world.children["RayCluster", GANG[0]].metadata.annotations["rljob.dev/restarts"] = text
    world.settle()


def test_exit_code_2_ends_the_run() -> None:
    world = running()
    world.exit("main-0-worker", 2, message="Ray is too old", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "ConfigurationError"


def deleted(world: World, pod: Pod) -> None:
    put(pod.metadata, deletion_timestamp=instant(world.now + 30))


def deleted_and_ended(world: World, pod: Pod) -> None:
    """The operator looks when the container has ended because of the deletion."""
    deleted(world, pod)
    world.exit(pod.metadata.name, 143)


def missing(world: World, pod: Pod) -> None:
    del world.pods[pod.metadata.name]


def replaced(world: World, pod: Pod) -> None:
    """KubeRay has made another pod before the operator looked."""
    missing(world, pod)
    world.make_pods()
    world.ready()


def evicted(world: World, pod: Pod) -> None:
    world.disrupt(pod.metadata.name)
    put(pod.status, phase="Failed")


def failed(world: World, pod: Pod) -> None:
    put(pod.status, phase="Failed")


MESSAGES = {
    deleted: "was deleted",
    deleted_and_ended: "was deleted",
    missing: "a pod is missing",
    replaced: "came in place of another",
    evicted: "was disrupted",
    failed: "was terminated by its node",
}


@pytest.mark.parametrize("lose", MESSAGES)
@pytest.mark.parametrize("kind", ["head", "worker"])
def test_an_engine_that_loses_a_pod_is_replaced_at_once_and_for_free(lose: Any, kind: str) -> None:
    world = running()
    lose(world, pods_of(world, GANG[0])[kind == "worker"])
    made = world.decide()
    world.settle()
    assert clusters(world) == ["sums-rollout-main-1", "sums-rollout-main-2"]
    successor = world.children["RayCluster", "sums-rollout-main-2"]
    assert "rljob.dev/restarts" not in successor.metadata.annotations
    assert MESSAGES[lose] in " ".join(event.message for event in made.events)
    recover(world)
    assert (world.role(POOL).ready, world.role(POOL).restarts) == (2, 0)
    assert clusters(world) == ["sums-rollout-main-1", "sums-rollout-main-2"]


def test_an_engine_that_loses_a_pod_at_once_is_replaced_after_a_while() -> None:
    world = World(rollouts=pool())
    world.run_up()
    deleted(world, pods_of(world, GANG[0])[0])
    made = world.settle()
    assert clusters(world) == GANG
    assert made.after == QUICK_END_SECONDS
    world.now += QUICK_END_SECONDS
    world.settle()
    assert GANG[0] not in clusters(world)


@pytest.mark.parametrize("how", [deleted, evicted])
def test_a_clock_that_was_set_back_holds_nothing_up(how: Any) -> None:
    world = running()
    world.now -= 7200
    how(world, pods_of(world, GANG[0])[0])
    world.settle()
    assert GANG[0] not in clusters(world)


def test_an_exit_in_the_future_is_not_waited_for() -> None:
    world = running()
    world.exit("main-0-worker", 1, fatal=False)
    world.now -= 7200
    world.settle()
    assert GANG[0] not in clusters(world)


def test_an_outdated_engine_stays_while_no_other_may_be_made() -> None:
    world = running()
    before = uids(world)
    world.unschedulable(FULL, "trainer-1-uid")
    world.change(rollouts=[{**pool()[0], "template": {"spec": {"nodeSelector": {"zone": "b"}}}}])
    world.settle()
    assert uids(world) == before
    world.ready("trainer")
    world.settle()
    assert uids(world) != before


def test_pods_of_a_deleted_engine_do_not_count() -> None:
    world = running()
    kept = pods_of(world, GANG[0])
    world.disrupt("main-0-worker")
    world.settle()
    recover(world)
    world.pods |= {pod.metadata.name: pod for pod in kept}  # the garbage collector is late
    world.settle()
    assert world.role(POOL).ready == 2
    assert clusters(world) == ["sums-rollout-main-1", "sums-rollout-main-2"]


def test_a_name_is_used_again_when_nothing_of_the_old_engine_is_left() -> None:
    world = running()
    (kept, *_) = pods_of(world, GANG[0])
    world.disrupt("main-0-worker")
    world.plan()
    assert "sums-rollout-main-2" in clusters(world)
    put(kept.metadata, deletion_timestamp=instant(world.now))
    world.pods[kept.metadata.name] = kept  # on a lost node
    recover(world)
    world.provisioned()
    world.now += 60
    world.disrupt("main-1-worker")
    world.plan()
    assert clusters(world) == ["sums-rollout-main-2", "sums-rollout-main-3"]
    del world.pods[kept.metadata.name]
    recover(world)
    world.provisioned()
    world.now += 60
    world.disrupt("main-2-worker")
    world.plan()
    assert clusters(world) == ["sums-rollout-main-0", "sums-rollout-main-3"]


def test_a_ray_cluster_that_a_user_deleted_is_made_again() -> None:
    world = running()
    world.remove(("RayCluster", GANG[0]))
    world.settle()
    assert clusters(world) == GANG


# --- scaling and draining ---------------------------------------------------------------------------------------------


def test_an_engine_is_drained_before_it_is_removed() -> None:
    world = running(4)
    report(world, elastic_0=9, elastic_1=3)
    world.scale(POOL, 3)
    made = world.settle()
    assert clusters(world) == [*GANG, *ELASTIC]
    (name,) = world.status.draining
    assert world.pods[name].metadata.labels["ray.io/cluster"] == ELASTIC[1], "the one with the lowest load"
    assert world.pods[name].metadata.labels["ray.io/node-type"] == "head"
    assert made.after == 60
    report(world, elastic_0=9, elastic_1=-1)
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]]
    assert world.status.draining == []


def test_an_engine_that_does_not_drain_is_removed_after_a_minute() -> None:
    world = running(3)
    report(world)
    world.scale(POOL, 2)
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]]
    world.now += 60
    world.settle()
    assert clusters(world) == GANG


def test_an_engine_that_is_not_ready_is_removed_at_once() -> None:
    world = running(4)
    report(world)
    world.waiting("ContainerCreating", "", "elastic-0-worker")
    world.scale(POOL, 3)
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[1]]


def test_an_engine_is_kept_if_the_scale_rises_again() -> None:
    world = running(3)
    report(world)
    world.scale(POOL, 2)
    world.settle()
    world.scale(POOL, 3)
    world.settle()
    assert world.status.draining == []
    world.now += 100
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]]


def test_elastic_engines_are_given_back_to_a_gang_that_waits() -> None:
    world = running(4)
    report(world, elastic_0=-1, elastic_1=-1)
    world.unschedulable(FULL, "trainer-1-uid")
    world.now += 6
    world.settle()
    assert clusters(world) == GANG


@pytest.mark.parametrize("provider", ["none", "kubernetes"])
def test_of_two_elastic_engines_that_have_a_part_of_their_nodes_the_younger_gives_its_own_back(provider: str) -> None:
    world = running(scheduling={"gang": {"provider": provider}})
    world.scale(POOL, 4)
    world.settle()
    world.make_pods()
    world.ready(*(pod.metadata.name for pod in pods_of(world, ELASTIC[0]) + pods_of(world, ELASTIC[1])[:1]))
    world.unschedulable(FULL, *(pod.metadata.name for pod in pods_of(world, ELASTIC[1])[1:]))
    world.now += 3600
    world.settle()
    assert clusters(world) == [*GANG, *ELASTIC], "one engine that waits takes nothing from another"
    world.unschedulable(FULL, pods_of(world, ELASTIC[0])[1].metadata.name)
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]]
    world.now += 3600
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]], "the nodes are for the older one"
    world.ready()
    world.settle()
    assert clusters(world) == [*GANG, *ELASTIC]


def test_the_scheduler_of_a_gang_places_the_rest_of_its_engines() -> None:
    world = running(scheduling={"gang": {"provider": "volcano"}})
    for name in GANG:
        world.unschedulable(FULL, pods_of(world, name)[1].metadata.name)
    world.settle()
    assert clusters(world) == GANG


def test_engines_that_are_being_placed_are_not_removed() -> None:
    world = running()
    world.scale(POOL, 4)
    world.settle()
    world.make_pods()
    for name in ELASTIC:
        world.ready(pods_of(world, name)[0].metadata.name)
    world.now += PARTIAL_SECONDS - 1
    assert world.settle().after == 1 and clusters(world) == [*GANG, *ELASTIC]


def test_an_engine_of_the_minimum_has_precedence_over_an_elastic_one_without_a_gang() -> None:
    world = running(3)
    world.exit(pods_of(world, GANG[0])[0].metadata.name, 1, fatal=False)
    world.now += 60
    world.settle()
    world.make_pods()
    successor = "sums-rollout-main-2"
    world.ready(pods_of(world, successor)[0].metadata.name)
    for pod in (pods_of(world, successor)[1], pods_of(world, ELASTIC[0])[1]):
        world.unschedulable(FULL, pod.metadata.name)
    world.now += PARTIAL_SECONDS
    world.settle()
    assert clusters(world) == [GANG[1], successor]


def test_a_pool_that_cannot_grow_any_more_drains_its_elastic_engines() -> None:
    world = running(3)
    report(world)
    world.change(rollouts=[{**ACROSS, "replicas": {"min": 2}}])
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]]
    report(world, elastic_0=-1)
    world.settle()
    assert clusters(world) == GANG


def test_the_scale_status_counts_engines() -> None:
    world = running(3)
    scale = next(each for each in world.decide().desired if each["kind"] == "RLJobScale")
    assert scale["status"]["replicas"] == 3


def test_the_replicas_of_a_deleted_scale_are_the_present_engines() -> None:
    world = running(3)
    world.remove(("RLJobScale", "sums-rollout-main"))
    world.settle()
    assert clusters(world) == [*GANG, ELASTIC[0]]


# --- changes, suspension, end -----------------------------------------------------------------------------------------


def test_engines_are_replaced_one_after_the_other_after_a_change_of_the_pool() -> None:
    world = running()
    before = uids(world)
    world.change(rollouts=[{**pool()[0], "template": {"spec": {"nodeSelector": {"zone": "b"}}}}])
    world.settle()
    assert len(set(uids(world).values()) & set(before.values())) == 1
    assert world.role(POOL).summary == "2 of 4 rollout-main pods not created yet"
    recover(world)
    assert not set(uids(world).values()) & set(before.values())
    recover(world)
    assert world.role(POOL).ready == 2
    for name in clusters(world):
        spec = world.children["RayCluster", name].body["spec"]
        assert spec["headGroupSpec"]["template"]["spec"]["nodeSelector"] == {"zone": "b"}
        assert spec["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"] == {"zone": "b"}


def test_an_engine_that_is_to_be_replaced_after_a_change_is_not_applied() -> None:
    world = running()
    world.change(rollouts=[{**pool()[0], "template": {"spec": {"nodeSelector": {"zone": "b"}}}}])
    made = world.decide()
    refs = {each["metadata"]["name"] for each in made.desired if each["kind"] == "RayCluster"}
    assert not refs & set(GANG)


def test_a_suspended_job_has_no_ray_clusters_and_gets_them_back() -> None:
    world = running(suspendGraceSeconds=0)
    world.change(suspend=True)
    world.settle()
    assert clusters(world) == [] and world.status.ready.rollout == "0/0"
    world.change(suspend=False)
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()
    assert clusters(world) == GANG


def test_the_end_of_the_run_deletes_ray_clusters() -> None:
    world = running()
    world.tell(state="Succeeded")
    world.settle()
    assert clusters(world) == []


def test_a_disruption_budget_lets_one_pod_go_at_a_time() -> None:
    world = running(3)

    def least() -> int:
        budgets = (each for each in world.decide().desired if each["kind"] == "PodDisruptionBudget")
        (found,) = [each for each in budgets if each["metadata"]["name"] == "sums-rollout-main"]
        return found["spec"]["minAvailable"]

    assert least() == 5
    world.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "elastic-0-worker")
    world.now += 301
    assert least() == 4, "a pod that finds no node protects nothing"


def test_plans_are_idempotent() -> None:
    world = running(4)
    made = world.decide()
    assert not made.deletions and not made.events
    again = world.decide()
    assert [each["metadata"] for each in made.desired] == [each["metadata"] for each in again.desired]
    live = {name: child.metadata for (kind, name), child in world.children.items() if kind == "RayCluster"}
    for each in made.desired:
        if each["kind"] == "RayCluster":
            assert replace(live[each["metadata"]["name"]]).annotations == each["metadata"]["annotations"]


def test_the_restarts_of_an_engine_that_ends_while_the_trainer_has_no_node_are_kept() -> None:
    world = running()
    world.exit(f"{GANG[0]}-worker", 1, fatal=False)
    world.unschedulable("0/9 nodes are available: 9 Insufficient nvidia.com/gpu.", "sums-trainer")
    world.now += 61
    world.settle()
    assert clusters(world) == GANG, "its successor cannot be created yet"
    world.ready("sums-trainer")
    recover(world)
    assert world.children["RayCluster", clusters(world)[1]].metadata.annotations["rljob.dev/restarts"] == "1"


@pytest.mark.parametrize("age", [3, 3600])
def test_an_exit_beside_a_deleted_pod_of_the_engine_is_free(age: int) -> None:
    """The other hosts lose it, and exit."""
    world = World(rollouts=pool())
    world.run_up()
    world.now += age
    head, worker = pods_of(world, GANG[0])
    put(head.metadata, deletion_timestamp=instant(world.now + 30))
    world.exit(worker.metadata.name, 1, fatal=False)
    world.now += QUICK_END_SECONDS
    world.settle()
    assert "rljob.dev/restarts" not in world.children["RayCluster", "sums-rollout-main-2"].metadata.annotations
