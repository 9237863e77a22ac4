"""Gangs that a scheduler places as a whole: their pods are created together, and their PodGroup follows them."""

from typing import Any

import pytest
from msgspec.structs import force_setattr

from rljob.manifests.inputs import Cluster
from rljob.operator.planning import plan
from rljob.operator.planning.gang_placement import PLACE_SECONDS, REORDER_SECONDS
from rljob.operator.planning.timestamps import instant

from .world import World

GROUP = "PodGroup.scheduling.k8s.io"
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available."
OTHERS = "waiting for minCount pods from a gang to be scheduled"
ENGINES, ELASTIC = "sums-rollout-main", "sums-rollout-main-elastic"
WITH_GROUP = ("kubernetes", "volcano", "coscheduling")
SCALED = [{"name": "main", "replicas": {"min": 2, "max": 4}}]


ACROSS = [{"name": "main", "hosts": 2, "parallelism": {"tensor": 16}, "replicas": {"min": 2, "max": 3}}]
CLUSTERS = [f"{ENGINES}-0", f"{ENGINES}-1"]


def gang(provider: str = "kubernetes", **spec: Any) -> World:
    return World(**{"scheduling": {"gang": {"provider": provider}}, "rollouts": SCALED, **spec})


def replicas(world: World, name: str = ENGINES) -> int:
    return world.children["Deployment", name].body["spec"]["replicas"]


def created(world: World) -> World:
    """Have all pods of the gang exist, without nodes."""
    for _ in range(2):
        world.settle()
        world.make_pods()
    world.settle()
    return world


def min_count(world: World) -> int:
    return world.children[GROUP, "sums-gang"].body["spec"]["schedulingPolicy"]["gang"]["minCount"]


@pytest.mark.parametrize("provider", WITH_GROUP)
def test_the_engines_of_the_gang_do_not_wait_for_the_trainer_but_elastic_ones_wait_for_the_gang(provider):
    world = created(gang(provider))
    world.scale("rollout-main", 4)
    world.settle()
    assert replicas(world) == 2 and replicas(world, ELASTIC) == 0
    world.ready("trainer")
    world.settle()
    assert replicas(world, ELASTIC) == 0, "two members have no node yet"
    world.ready()
    world.settle()
    assert replicas(world, ELASTIC) == 2


def test_the_trainer_of_a_native_gang_is_created_last_because_the_last_pod_is_tried_first():
    world = gang(trainer={"nodes": 1})
    world.settle()
    assert world.names("Job") == [] and replicas(world) == 2 and min_count(world) == 3
    world.make_pods()
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_engines_that_are_tried_before_several_pods_of_a_trainer_are_created_again_once():
    world = created(gang())
    world.unschedulable(FULL, "trainer")
    world.unschedulable(OTHERS, "rollout")
    world.now += REORDER_SECONDS - 1
    assert world.settle().after == 1 and replicas(world) == 2
    world.now += 1
    world.settle()
    assert replicas(world) == 0
    world.make_pods()
    world.settle()
    world.make_pods()
    assert replicas(world) == 2 and len(world.find("rollout")) == 2
    world.unschedulable(FULL)
    world.now += 3600
    world.settle()
    assert replicas(world) == 2, "they are younger than the trainer's pods now"


def test_engines_of_a_gang_that_has_nodes_stay():
    world = created(gang())
    world.ready("rollout")
    world.unschedulable(FULL, "trainer")
    world.now += 3600
    world.settle()
    assert replicas(world) == 2


def test_a_gang_without_nodes_is_reported_with_the_cause_of_the_pod_that_finds_no_room():
    world = created(gang())
    assert world.why == "Starting"
    world.unschedulable(OTHERS, "rollout")
    world.unschedulable(FULL, "trainer")
    world.settle()
    assert world.condition("Ready") == (
        "False",
        "GangPending",
        "none of the 4 pods of the gang has a node: insufficient nvidia.com/gpu",
    )
    assert world.status.pending_since is not None
    world.ready("rollout")
    world.settle()
    assert world.why == "PodsPending", "a part has nodes"


def test_the_cause_of_a_gang_of_volcano_is_that_of_the_pod_without_room():
    world = created(gang("volcano"))
    others = "3/4 tasks in gang unschedulable: pod group is not ready, 4 Pending, 4 minAvailable"
    world.unschedulable(others, "rollout")
    world.unschedulable("0/2 nodes are unavailable: 2 Insufficient nvidia.com/gpu.", "trainer")
    world.settle()
    assert world.condition("Ready")[2] == "none of the 4 pods of the gang has a node: insufficient nvidia.com/gpu"


@pytest.mark.parametrize("provider", WITH_GROUP)
def test_a_gang_that_no_scheduler_looks_at_is_reported_too(provider):
    world = created(gang(provider))
    assert world.settle().after == PLACE_SECONDS and world.why == "Starting"
    world.now += PLACE_SECONDS
    world.settle()
    assert world.condition("Ready")[1:] == (
        "GangPending",
        "none of the 4 pods of the gang has a node: the scheduler has not placed it yet",
    )
    assert world.status.pending_since is not None, "failurePolicy.pendingSeconds counts this time"


@pytest.mark.parametrize("why", ["refused", "foreign", "terminating"])
def test_without_its_pod_group_no_pod_of_the_gang_is_created(why):
    world = gang()
    ref = GROUP, "sums-gang"
    if why == "terminating":
        world.settle()
        world.remove(("Deployment", ENGINES))
        force_setattr(world.children[ref].metadata, "deletion_timestamp", instant(world.now))
    else:
        getattr(world, why)[ref] = "the cluster has no type"
    world.settle()
    assert world.names("Job") == [] and ENGINES not in world.names("Deployment")
    assert ("sums-runner" in world.names("Deployment")) == (why != "foreign"), "a foreign object blocks the whole job"


def test_a_running_gang_stays_if_its_pod_group_is_refused_or_deleted():
    world = gang()
    world.run_up()
    force_setattr(world.children[GROUP, "sums-gang"].metadata, "deletion_timestamp", instant(world.now))
    made = world.settle()
    assert made.deletions == [] and "sums-trainer-1" in world.names("Job") and ENGINES in world.names("Deployment")


def test_a_native_pod_group_is_never_changed():
    world = gang()
    world.run_up()
    world.change(rollouts=[{"name": "main", "replicas": {"min": 3, "max": 4}}])
    made = world.settle()
    assert GROUP.partition(".")[0] not in {each["kind"] for each in made.desired}
    assert min_count(world) == 4 and replicas(world) == 3


def test_a_gang_with_fewer_pods_than_its_pod_group_demands_is_created_again_for_free():
    world = gang()
    world.run_up()
    world.change(rollouts=[{"name": "main", "replicas": {"min": 1, "max": 4}}])
    made = world.plan()
    assert {ref for ref, _ in made.deletions} == {
        (GROUP, "sums-gang"),
        ("Deployment", ENGINES),
        ("Job", "sums-trainer-1"),
    }
    world.settle()
    world.now += 60
    created(world)
    assert min_count(world) == 3 and replicas(world) == 1
    assert (world.status.trainer.number, world.status.trainer.charged) == (2, 0)


def test_a_gang_with_more_pods_than_its_pod_group_demands_is_created_again_when_its_trainer_has_no_node():
    world = gang()
    world.run_up()
    world.change(rollouts=[{"name": "main", "replicas": {"min": 3, "max": 4}}])
    world.settle()
    world.make_pods()
    assert min_count(world) == 4 and replicas(world) == 3, "the trainer works"
    world.exit("trainer", 1)
    world.fail_job()
    made = world.plan()
    assert {(GROUP, "sums-gang"), ("Deployment", ENGINES)} <= {ref for ref, _ in made.deletions}
    world.settle()
    world.now += 60
    created(world)
    assert min_count(world) == 5 and replicas(world) == 3 and world.names("Job") == ["sums-trainer-2"]
    assert (world.status.trainer.number, world.status.trainer.charged) == (2, 1)
    world.ready()
    made = world.settle()
    assert made.deletions == [] and min_count(world) == 5


def test_a_suspended_job_and_a_finished_job_have_no_pod_group():
    world = gang(suspendGraceSeconds=1)
    world.run_up()
    world.change(suspend=True)
    world.tell(state="Suspended")
    world.settle()
    assert world.condition("Suspended")[0] == "True" and (GROUP, "sums-gang") not in world.children
    assert world.status.gang_provider == ""
    other = gang()
    other.run_up()
    other.tell(state="Succeeded")
    other.settle()
    assert (GROUP, "sums-gang") not in other.children


def test_another_setting_of_the_cluster_does_not_change_the_gang_of_a_running_job():
    """The next attempt of its trainer would belong to a gang, and its engines would not."""
    world = World(rollouts=SCALED)
    world.run_up()
    assert world.status.gang_provider == "none"
    made = plan(world.observe(), Cluster(gang="kubernetes"))
    assert "PodGroup" not in {each["kind"] for each in made.desired}
    world.status = world.status.model_copy(update={"gang_provider": ""})
    made = plan(world.observe(), Cluster(gang="kubernetes"))
    assert made.status.gang_provider == "none", "its pods were created by a release without gangs"
    new = plan(World(rollouts=SCALED).observe(), Cluster(gang="kubernetes"))
    assert new.status.gang_provider == "kubernetes" and "PodGroup" in {each["kind"] for each in new.desired}


# --- engines that span hosts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", WITH_GROUP)
def test_engines_that_span_hosts_are_created_with_the_gang_and_elastic_ones_after_it(provider):
    world = gang(provider, rollouts=ACROSS)
    world.settle()
    assert world.names("RayCluster") == CLUSTERS
    world.scale("rollout-main", 3)
    created(world)
    world.ready("trainer")
    world.settle()
    assert world.names("RayCluster") == CLUSTERS, "the hosts of the engines have no node yet"
    world.ready()
    world.settle()
    assert world.names("RayCluster") == [*CLUSTERS, f"{ENGINES}-elastic-0"]


def test_the_trainer_of_a_native_gang_waits_for_every_host_of_its_engines():
    world = gang(rollouts=ACROSS, trainer={"nodes": 1})
    world.settle()
    assert world.names("Job") == [] and min_count(world) == 5
    world.make_pods()
    gone = world.find("worker")[0]
    del world.pods[gone.metadata.name]
    world.settle()
    assert world.names("Job") == []
    world.pods[gone.metadata.name] = gone
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_engines_that_span_hosts_are_created_again_to_be_tried_after_the_trainer():
    world = created(gang(rollouts=ACROSS))
    before = {name: world.children["RayCluster", name].metadata.uid for name in CLUSTERS}
    world.unschedulable(FULL)
    world.now += REORDER_SECONDS
    created(world)
    names = world.names("RayCluster")
    assert len(names) == 2 and not {world.children["RayCluster", name].metadata.uid for name in names} & {
        *before.values()
    }
    world.unschedulable(FULL)
    world.now += 3600
    world.settle()
    assert world.names("RayCluster") == names, "they are younger than the trainer's pods now"


def test_a_gang_that_lost_engines_across_hosts_is_created_again():
    world = gang(rollouts=ACROSS)
    world.run_up()
    world.change(rollouts=[{**ACROSS[0], "replicas": {"min": 1, "max": 3}}])
    deleted = {ref for ref, _ in world.plan().deletions}
    assert deleted == {(GROUP, "sums-gang"), ("Job", "sums-trainer-1"), *(("RayCluster", name) for name in CLUSTERS)}
    world.settle()
    world.now += 60
    created(world)
    assert min_count(world) == 4 and world.names("RayCluster") == CLUSTERS[:1], "the elastic engine comes later"


def test_without_its_pod_group_no_engine_across_hosts_is_created():
    world = gang(rollouts=ACROSS)
    world.refused[GROUP, "sums-gang"] = "forbidden"
    world.settle()
    assert world.names("RayCluster") == []


def test_a_gang_whose_engines_have_a_pending_host_waits():
    world = created(gang(rollouts=ACROSS))
    world.unschedulable(FULL)
    world.settle()
    assert world.condition("Ready")[2] == "none of the 6 pods of the gang has a node: insufficient nvidia.com/gpu"


# --- a PodGroup that a user deletes; pods of a lost node --------------------------------------------------------------


def delete_group(world: World) -> None:
    """Have a user delete the PodGroup, which stays as long as it has pods."""
    force_setattr(world.children[GROUP, "sums-gang"].metadata, "deletion_timestamp", instant(world.now))


def test_the_trainer_of_a_gang_whose_pod_group_a_user_has_deleted_gets_its_next_attempt():
    world = gang()
    world.run_up()
    delete_group(world)
    world.now += 3600
    world.exit("trainer", 1)
    world.fail_job()
    world.settle()
    world.now += 60
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"]


def test_an_engine_across_hosts_is_replaced_while_the_deleted_pod_group_stays():
    world = gang(rollouts=ACROSS)
    world.run_up()
    world.provisioned()
    world.now += 3600
    world.settle()
    delete_group(world)
    world.exit(f"{CLUSTERS[0]}-worker", 1, fatal=False)
    world.now += 60
    world.settle()
    assert world.names("RayCluster") == [CLUSTERS[1], f"{ENGINES}-2"]
