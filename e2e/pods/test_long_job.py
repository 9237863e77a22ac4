"""One job in pods that suffers, in order, what a job may suffer; each test begins where the one before ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from e2e.pods.checks import check_prompts
from e2e.pods.job import GPU_ROLES, RESTRICTED, Job, quickstart, restarts_of
from e2e.pods.killing import kill_containers
from e2e.pods.operators import Operators
from tools.cluster.client import Object
from tools.cluster.node import Cluster

STEPS = 160
EVERY = 10
START_SECONDS = 800.0
REPLACED_SECONDS = 240.0
ENGINE = "rollout-main"

YIELDING = {"requests": {"cpu": "10m", "memory": "512Mi"}}
"""Resources of trainer and engines: the jobs of tests in the other process have room on a node of two cores, and their
pods, which have to answer within seconds, get ten times the share of these."""

pytestmark = pytest.mark.timeout(1800)  # only what hangs: tests in another process and the machine may be busy


def manifest() -> Object:
    """Return the quickstart with smaller batches, more of them, and engines that may be scaled."""
    spec = quickstart()["spec"]
    template = {"spec": {"containers": [{"name": "main", "resources": YIELDING}]}}
    body = quickstart(
        training=spec["training"] | {"steps": STEPS, "promptsPerStep": 16},
        evaluation={"problems": 256},
        trainer=spec["trainer"] | {"template": template},
        rollouts=[
            spec["rollouts"][0]
            | {"kvCacheBytes": 64 << 20, "replicas": {"min": 1, "max": 3}, "template": template}
            | {"autoscaling": {"provider": "none"}}
        ],
        checkpoints={"everySteps": EVERY, "keep": 2},
        suspendGraceSeconds=120,
    )
    body["metadata"]["name"] = "long"
    return body


@pytest.fixture(scope="module")
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    """The job, from its beginning to its end."""
    found = Job(node, node.namespace("long", RESTRICTED), manifest())
    found.apply()
    yield found
    node.api.delete(f"/api/v1/namespaces/{found.namespace}")


@pytest.fixture
def operators(node: Cluster, installed: Any) -> Iterator[Operators]:
    found = Operators(node)
    yield found
    found.scale(found.usual)


def continues(job: Job, steps: int = 70) -> None:
    """Give the job more to do where it has less than ``steps`` left and might end before the test, on a fast machine.

    Another number of steps makes another coordinator, which takes the run up from its ledger.
    """
    progress = job.run_status()["progress"]
    if progress["steps"] - progress["step"] < steps:
        wanted = progress["step"] + steps + 30
        job.change(training={"steps": wanted})
        job.until(lambda: job.live()["progress"]["steps"] == wanted, 60, f"a coordinator that knows of {wanted} steps")
        job.has_pods("coordinator", 1, 60)
        job.reaches(job.step() + 1, REPLACED_SECONDS)  # it has its trainer again


def test_kubectl_apply_trains_in_pods(job: Job) -> None:
    job.has_reason("Initialized", "Initialized", START_SECONDS)
    job.has_pods("trainer", 1, START_SECONDS)
    job.has_pods(ENGINE, 1, START_SECONDS)
    job.reaches(2, START_SECONDS)
    job.has_reason("Ready", "Running", 30)
    job.until(lambda: job.status()["run"]["progress"]["step"] >= 2, 30, "the run's step in status.run")
    columns = job.kubectl("get", "rlj", job.name).splitlines()
    shown = dict(zip(columns[0].split(), columns[1].split(), strict=False))
    assert shown["READY"] == "Running" and int(shown["STEP"]) >= 2, columns
    ready = job.status()["ready"]
    assert (ready["trainer"], ready["rollout"], ready["reward"]) == ("1/1", "1/1", "1/1")
    first = job.ledger("SELECT metrics FROM applied WHERE step = 0")[0]["metrics"]
    assert json.loads(first)["first_step_logprob_error"] <= 1e-4


def test_a_deleted_rollout_pod_is_replaced_and_no_prompt_is_lost(job: Job) -> None:
    continues(job)
    before, engine, begun = job.lives(ENGINE), job.pod(ENGINE), job.step()
    job.delete_pods(engine)
    uid = engine["metadata"]["uid"]
    job.until(lambda: [pod for pod in job.pods(ENGINE) if pod["metadata"]["uid"] != uid], 60, "another pod")
    job.has_pods(ENGINE, 1, REPLACED_SECONDS)
    job.reaches(begun + 3, REPLACED_SECONDS)
    assert job.lives(ENGINE) == before, "others were touched"
    check_prompts(job)


def test_a_killed_trainer_pod_restarts_its_group_from_the_last_checkpoint_and_is_served_the_same_batches(
    job: Job,
) -> None:
    continues(job)
    before, incarnation = job.lives("trainer"), newest(job, "incarnations")["incarnation"]
    trainer = job.pod("trainer")
    wanted = "a few batches after a checkpoint, and before the next"
    job.until(lambda: job.step() % EVERY in (4, 5), REPLACED_SECONDS, wanted)
    kill_containers(trainer)
    checkpoint = newest(job, "checkpoints")["step"]
    served = job.ledger(f"SELECT step, samples FROM batches WHERE step >= {checkpoint}")
    lineage = job.run_status()["policy"]["lineage"]
    job.until(lambda: job.status()["trainer"]["number"] == 2, 60, "the second attempt")
    (new,) = job.has_pods("trainer", 1, REPLACED_SECONDS)
    assert new["metadata"]["uid"] != trainer["metadata"]["uid"]
    (role,) = [role for role in job.status()["roles"] if role["name"] == "trainer"]
    assert (role["restarts"] == 1 and "137" in role["lastExit"]) or "signal 9" in role["lastExit"], role
    job.reaches(served[-1]["step"] + 3, REPLACED_SECONDS)
    started = job.ledger(f"SELECT * FROM incarnations WHERE incarnation = {incarnation + 1}")[0]
    assert started["step"] == checkpoint
    steps = {row["step"] for row in served}
    again = job.ledger(f"SELECT step FROM applied WHERE incarnation > {incarnation} AND step >= {checkpoint}")
    assert steps - {max(steps)} <= {row["step"] for row in again}, "a batch was not replayed"
    assert job.ledger(f"SELECT step, samples FROM batches WHERE step IN ({', '.join(map(str, steps))})") == served
    assert job.run_status()["policy"]["lineage"] == lineage, "the same batches gave other weights"
    assert job.lives("trainer") == before, "others were touched"


def test_a_killed_coordinator_resumes_while_engines_keep_their_weights(job: Job) -> None:
    continues(job)
    before, coordinator = job.lives("coordinator"), job.pod("coordinator")
    engine = job.ledger("SELECT engine FROM served ORDER BY time DESC LIMIT 1")[0]["engine"]
    starts = int(job.ledger("SELECT value FROM meta WHERE key = 'coordinator_starts'")[0]["value"])
    killed = time.time()
    kill_containers(coordinator)
    job.until(lambda: restarts_of(job.pod("coordinator")) == restarts_of(coordinator) + 1, 60, "a restart")
    job.has_pods("coordinator", 1, REPLACED_SECONDS)
    job.reaches(job.step() + 3, REPLACED_SECONDS)  # three batches need weights that only the new one can have had sent
    assert int(job.ledger("SELECT value FROM meta WHERE key = 'coordinator_starts'")[0]["value"]) == starts + 1
    assert job.lives("coordinator") == before, "others were touched"
    served = job.ledger(f"SELECT engine, lineage, step FROM served WHERE time > {killed} ORDER BY step")
    assert served, "no weights were sent"
    assert {row["engine"] for row in served} == {engine}, "an engine was started again"
    last = job.ledger(f"SELECT MAX(step) AS step FROM served WHERE time < {killed}")[0]["step"]
    assert served[0]["step"] > last, "weights were sent again that the engine had"


@pytest.mark.alone
def test_a_killed_operator_changes_nothing_and_catches_up(job: Job, operators: Operators) -> None:
    continues(job)
    before, pods = job.lives(), operators.pods()
    operators.scale(0, wait=False)  # or their containers would be started again at once
    for pod in pods:
        kill_containers(pod)
    operators.gone()
    budget = job.get("PodDisruptionBudget", f"{job.name}-{ENGINE}")
    assert budget is not None
    job.kubectl("delete", "pdb", f"{job.name}-{ENGINE}")
    job.scale(ENGINE, 2)
    job.reaches(job.step() + 3, REPLACED_SECONDS)
    assert job.lives() == before
    assert job.get("PodDisruptionBudget", f"{job.name}-{ENGINE}") is None, "it was recreated"
    operators.scale(operators.usual)
    job.until(lambda: job.get("PodDisruptionBudget", f"{job.name}-{ENGINE}"), 60, "the object to be made again")
    job.until(lambda: len(job.pods(ENGINE)) == 2, 30, "the second engine to be begun")
    assert job.lives().items() >= before.items()


def test_rollouts_scale_from_one_to_three_while_training_and_a_new_one_serves_within_one_weight_update(
    job: Job,
) -> None:
    continues(job, 110)
    old = {row["engine"] for row in job.ledger("SELECT DISTINCT engine FROM served")}  # the second may be among them
    job.scale(ENGINE, 3)
    began = job.step()
    seen: dict[str, int] = {}  # engine → batches applied when it was first there

    def all_serve() -> set[str] | Literal[False]:
        live = job.live()
        there = {component["instance"] for component in live["components"] if component["role"] == "agent"}
        for engine in there:
            seen.setdefault(engine, live["progress"]["step"])
        serve = {row["engine"] for row in job.ledger("SELECT DISTINCT engine FROM completions")}
        return len(there) == 3 and there <= serve and there

    new = job.until(all_serve, REPLACED_SECONDS, "three engines to serve") - old
    assert new, "an engine more than before"
    for engine in new:
        first = job.ledger(f"SELECT MIN(step) AS step FROM served WHERE engine = '{engine}'")[0]["step"]
        assert first <= seen[engine] + 1, f"{engine} was there at version {seen[engine]} and got weights at {first}"
    assert job.step() > began, "training stood still"
    job.until(lambda: job.status()["ready"]["rollout"] == "3/3", 30, "3/3 in the status")


def test_rollouts_scale_back_to_one_and_no_prompt_is_lost(job: Job) -> None:
    continues(job)
    least = {name for name in job.lives() if f"-{ENGINE}-elastic" not in name}
    job.scale(ENGINE, 1)
    job.has_pods(ENGINE, 1, REPLACED_SECONDS)
    assert set(job.lives()) == least, "the engine of the gang is the one that stays"
    job.until(lambda: not job.status().get("draining"), 30, "the end of the drain")
    job.reaches(job.step() + 2, REPLACED_SECONDS)
    check_prompts(job)


def test_suspend_frees_every_pod_and_resume_continues_from_the_checkpoint(job: Job) -> None:
    continues(job, 30)  # nothing trains while it is suspended, and the last test waits for all steps that are left
    job.change(suspend=True)
    job.has_reason("Suspended", "Suspended", REPLACED_SECONDS)
    job.until(lambda: not job.pods(), 60, "all pods to be gone")
    run = job.status()["run"]
    assert run["state"] == "Suspended" and run["lastCheckpoint"]["step"] == run["progress"]["step"]
    job.change(suspend=False)
    job.reaches(run["progress"]["step"] + 2, START_SECONDS)
    assert newest(job, "incarnations")["step"] == run["progress"]["step"]
    assert job.condition("Suspended")[0] == "False"


def test_it_reaches_its_accuracy_frees_its_gpu_roles_at_once_and_its_audit_is_clean(job: Job) -> None:
    job.until(lambda: job.condition("Complete")[0] == "True", 600, "the job to be complete")
    job.until(lambda: not any(job.pods(role) for role in GPU_ROLES), 10, "trainer and engines to be gone")
    job.has_reason("Complete", "Succeeded", 1)
    live = job.run_status()
    assert live["state"] == "Succeeded" and live["progress"]["step"] == live["progress"]["steps"]
    before, after = live["evaluations"][0]["accuracy"], live["evaluations"][-1]["accuracy"]
    assert live["evaluations"][-1]["version"] == live["progress"]["step"]
    assert after >= 0.75 and after - before >= 0.3, (before, after)
    check_prompts(job)
    report = job.audit()
    assert report["ok"] and report["finished"], [check for check in report["checks"] if not check["ok"]]
    assert job.get("Pod", f"{job.name}-coordinator-0") is not None


def newest(job: Job, table: str) -> dict[str, Any]:
    """Return the newest row of a table that has times."""
    return job.ledger(f"SELECT * FROM {table} ORDER BY time DESC LIMIT 1")[0]
