"""Invariants of plans, for random sequences of events."""

import copy

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob.api.job_status import RLJobStatus
from rljob.operator.planning import Rendering, plan
from rljob.operator.planning.timestamps import instant, seconds_of
from rljob.operator.planning.trainer import jobs

from .world import CLUSTER, World, put

POOL = "rollout-main"
STATES = ["Starting", "Running", "Evaluating", "Finishing", "Suspended"]


class Histories(RuleBasedStateMachine):
    """Random actions of a cluster, a user, a coordinator, and an operator that crashes sometimes."""

    def __init__(self):
        super().__init__()
        self.world = World(
            initializer={"command": ["make"]},
            failurePolicy={"maxRestarts": 4, "pendingSeconds": 5000},
            activeDeadlineSeconds=500_000,
            suspendGraceSeconds=60,
            keepCoordinatorSeconds=60,
            ttlSecondsAfterFinished=10_000,
        )
        self.history = [self.world.status]
        self.highest = 0
        self.over = False

    @initialize(up=st.booleans())
    def begins(self, up):
        if up:
            self.world.run_up()
            self.history.append(self.world.status)

    # the operator

    @rule()
    def settles(self):
        for _ in range(4):
            self.plans("never")

    @rule(crash=st.sampled_from(["never", "never", "before its status", "after recording"]))
    def plans(self, crash):
        world = self.world
        before = world.status
        made = world.decide()
        self.check(made, before)
        if crash == "after recording" and made.record_first:
            world.status = made.status
        elif crash == "before its status" and not made.record_first:
            kept, events = world.status, list(world.events)
            world.do(made)
            world.status, world.events = kept, events
        else:
            world.do(made)
        self.history.append(world.status)

    @rule(back=st.integers(1, 5))
    def plans_from_an_old_status(self, back):
        """A plan from an old status is rejected if it records a decision; the rest of it must be harmless."""
        old = self.history[-min(back, len(self.history))]
        made = self.world.decide(old)
        self.check_trainers(made)
        if not made.record_first and not self.over:
            self.world.do(replaced(made, self.world.status))

    # the user

    @rule(suspend=st.booleans())
    def suspends_or_resumes(self, suspend):
        if self.world.spec.get("suspend", False) != suspend:
            self.world.change(suspend=suspend)

    @rule(zone=st.sampled_from("ab"))
    def changes_the_trainer(self, zone):
        self.world.change(trainer={"nodes": 2, "template": {"spec": {"nodeSelector": {"zone": zone}}}})

    @rule(problem=st.sampled_from([[], ["spec.training.steps: must be at least 0"]]))
    def writes_an_invalid_spec(self, problem):
        self.world.problems = problem

    @precondition(lambda self: any(kind == "RLJobScale" for kind, _ in self.world.children))
    @rule(replicas=st.integers(0, 6))
    def scales(self, replicas):
        self.world.scale(POOL, replicas)

    @rule(replicas=st.sampled_from([{"min": 2, "max": 4}, {"min": 2}, {"min": 1, "max": 3}]))
    def changes_the_range_of_the_pool(self, replicas):
        self.world.change(rollouts=[{"name": "main", "replicas": replicas}])

    # the coordinator

    @rule(state=st.sampled_from(STATES), age=st.integers(0, 3), load=st.integers(-1, 2))
    def reports(self, state, age, load):
        engines = [
            {"name": pod.metadata.name, "load": max(0, load), "drained": load < 0} for pod in self.world.find("rollout")
        ]
        self.world.tell(state=state, observed_generation=max(0, self.world.generation - age), engines=engines)

    @rule(state=st.sampled_from(["Succeeded", "Failed"]), really=st.integers(0, 9))
    def reports_the_end(self, state, really):
        if really == 0:
            self.world.tell(state=state)

    # the cluster

    @rule(seconds=st.sampled_from([0.4, 1, 5, 30, 61, 700, 5000, -0.7, -30, -4000]))
    def time_passes_or_is_set_back(self, seconds):
        self.world.now += seconds

    @rule()
    def pods_are_created(self):
        self.world.make_pods()

    @rule()
    def pods_become_ready(self):
        self.world.ready()

    @rule()
    def pods_become_unschedulable(self):
        self.world.unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "trainer", "elastic")

    @rule(code=st.sampled_from([0, 1, 137]), disrupted=st.booleans())
    def the_trainer_fails(self, code, disrupted):
        if jobs(self.world.observe()):
            self.world.make_pods()
            if disrupted:
                self.world.disrupt("trainer")
            self.world.exit("trainer", code)
            self.world.fail_job()

    @rule()
    def jobs_complete(self):
        for name in self.world.names("Job"):
            self.world.complete_job(name)

    @rule(which=st.integers(0, 40), code=st.sampled_from([1, 137]))
    def a_container_fails(self, which, code):
        pods = [pod for pod in self.world.find() if "trainer" not in pod.metadata.name]
        if pods:
            self.world.exit(pods[which % len(pods)].metadata.name, code, fatal=False)

    @rule(which=st.integers(0, 40))
    def a_user_deletes_a_child(self, which):
        refs = sorted(ref for ref in self.world.children if ref[0] != "PersistentVolumeClaim")
        if refs:
            self.world.remove(refs[which % len(refs)])

    @rule(kind=st.sampled_from(["Job", "RLJobScale"]))
    def a_user_removes_a_label(self, kind):
        """The object and its pods exist, but the operator does not see the object."""
        self.world.make_pods()
        for name in self.world.names(kind):
            if "initializer" not in name:
                del self.world.children[kind, name]
        self.settles()
        self.world.now += 61
        self.settles()

    @rule(which=st.integers(0, 40))
    def a_user_deletes_a_child_with_a_finalizer(self, which):
        refs = sorted(ref for ref in self.world.children if ref[0] != "PersistentVolumeClaim")
        if refs:
            put(self.world.children[refs[which % len(refs)]].metadata, deletion_timestamp=instant(self.world.now))

    @rule()
    def deleted_objects_disappear(self):
        for ref in sorted(self.world.children):
            if self.world.children[ref].metadata.deletion_timestamp is not None:
                self.world.remove(ref)

    # invariants

    def check(self, made, before):
        """Check a plan against the status from which it was computed."""
        self.check_trainers(made)
        self.check_orphaned_jobs(made)
        after = made.status
        assert not {ref for ref, _ in made.deletions} & {
            (each["kind"], each["metadata"]["name"]) for each in made.desired
        }
        if is_over(before):
            assert is_over(after), "what is over stays so"
        if is_over(after):
            assert made.desired == [], "nothing is started once it is over"
            self.check_rest(made)
        if before.trainer and after.trainer:
            old, new = before.trainer, after.trainer
            assert new.number >= old.number
            if new.number == old.number:
                assert new.charged == old.charged
            else:
                assert made.record_first, "an attempt is recorded before it is made"
                lived = max(0.0, self.world.now - seconds_of(old.started_at))
                assert new.charged >= max(0.0, old.charged - lived / 600) - 0.01
                assert new.charged <= old.charged + 1
        for role in after.roles:
            earlier = next((each for each in before.roles if each.name == role.name), None)
            assert earlier is None or role.restarts >= earlier.restarts
        assert made.after is None or made.after > 0
        self.over = is_over(after)

    def check_rest(self, made):
        """Check that an ended job has no workloads except its coordinator and failed Jobs."""
        deleted_uids = {uid for _, uid in made.deletions}
        for (kind, name), child in self.world.children.items():
            if kind not in ("Deployment", "StatefulSet", "Job") or child.metadata.uid in deleted_uids:
                continue
            conditions = child.body.get("status", {}).get("conditions", [])
            failed = kind == "Job" and any(each["type"] == "Failed" for each in conditions)
            assert failed or name == "sums-coordinator" or child.metadata.deletion_timestamp is not None

    def check_trainers(self, made):
        """Check that after the plan there is at most one trainer Job, with the highest number so far."""
        leaving = {name for (kind, name), _ in made.deletions if kind == "Job"}
        there = {child.metadata.name for child in jobs(self.world.observe()).values()}
        there = {name for name in there if self.world.children["Job", name].metadata.deletion_timestamp is None}
        created = {each["metadata"]["name"] for each in made.desired if each["kind"] == "Job"} - {"sums-initializer"}
        assert len((there - leaving) | created) <= 1
        highest = max(jobs(self.world.observe()), default=0)
        assert all(int(name.rpartition("-")[2]) >= highest for name in created)

    def check_orphaned_jobs(self, made):
        """Check that no trainer is created beside pods of another attempt whose Job is not observed."""
        deleted_uids = {uid for _, uid in made.deletions}
        created = {each["metadata"]["name"] for each in made.desired if each["kind"] == "Job"} - {"sums-initializer"}
        seen = {child.metadata.uid for child in self.world.children.values()}
        owners = {pod.metadata.owner_references[0].uid for pod in self.world.find("trainer")}
        assert not created or owners <= deleted_uids | seen

    @rule()
    def planning_twice_gives_the_same_plan(self):
        observed = self.world.observe()
        made = plan(observed, CLUSTER, Rendering())
        assert plan(copy.deepcopy(observed), CLUSTER, Rendering()) == made

    @invariant()
    def planning_after_execution_requests_nothing_new(self):
        made = self.world.decide()
        written = RLJobStatus.model_validate_json(made.status.model_dump_json())
        again = self.world.decide(written)
        assert again.status == written
        assert again.events == []
        assert not again.record_first


def is_over(status):
    return any(each.type in ("Complete", "Failed") and each.status == "True" for each in status.conditions)


def replaced(made, status):
    """Return the plan with another status: the part that is executed if the status write is rejected."""
    return type(made)(desired=made.desired, deletions=made.deletions, pod_costs=made.pod_costs, status=status)


Histories.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
