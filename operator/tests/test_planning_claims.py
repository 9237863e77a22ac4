"""Two jobs with one claim: the later job waits, and a job with pods does not wait."""

import msgspec
import pytest

from rljob.operator.cache import Cache, child_reader, read_job
from rljob.operator.decoded_jobs import DecodedJobs
from rljob.operator.object_kinds import BY_KEY, RLJOBS
from rljob.operator.planning.claims import claim_in_use

SPEC = {
    "models": [{"name": "policy", "source": "job://model"}],
    "training": {"steps": 5},
    "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"}],
    "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
    "rollouts": [{"name": "main"}],
    "keepCoordinatorSeconds": 600,
}
ENDED = {"conditions": [{"type": "Complete", "status": "True", "reason": "Succeeded", "lastTransitionTime": "x"}]}
REMEDY = "; delete it, wait, or create this job again with another claim"


class Jobspace:
    """The caches of an operator."""

    def __init__(self):
        self.jobs = Cache(RLJOBS, read_job)
        kinds = ("Deployment", "StatefulSet", "Job", "RayCluster")
        self.children = {kind: Cache(BY_KEY[kind], child_reader(kind)) for kind in kinds}
        self._read = DecodedJobs()

    def add(self, name, second, namespace="n", uid="", status=None, **spec):
        created = f"2026-01-01T00:00:{second:02}Z"
        meta = {"name": name, "namespace": namespace, "uid": uid or name, "resourceVersion": "1", "generation": 1}
        body = {"metadata": meta | {"creationTimestamp": created}, "spec": SPEC | spec, "status": status or {}}
        self.jobs.put(msgspec.json.encode(body))

    def run(self, name, kind="StatefulSet", role="coordinator", **status):
        owner = {"apiVersion": RLJOBS.api_version, "kind": "RLJob", "name": name, "uid": name, "controller": True}
        meta = {"name": f"{name}-{role}", "namespace": "n", "uid": f"{name}-{role}", "resourceVersion": "1"}
        meta |= {"labels": {"rljob.dev/job": name, "rljob.dev/role": role}, "ownerReferences": [owner]}
        self.children[kind].put(msgspec.json.encode({"metadata": meta, "status": status}))

    def ask(self, name):
        cached = self.jobs.find("n", name)
        job = self._read.read(cached)[0].job
        assert job is not None
        return claim_in_use(cached.metadata, job, self.jobs, self.children, self._read.read)


@pytest.fixture
def space():
    found = Jobspace()
    found.add("second", 5, storage={"claim": "first-storage"})
    return found


def test_a_job_waits_for_an_older_unfinished_job_with_the_same_claim(space):
    space.add("first", 1)
    assert space.ask("second") == f"claim first-storage is in use by RLJob first{REMEDY}"
    assert space.ask("first") == ""
    space.add("third", 7, storage={"claim": "first-storage"})
    assert "first-storage is in use by" in space.ask("third")


def test_a_job_waits_for_the_kept_coordinator_of_a_finished_job(space):
    space.add("first", 1, status=ENDED)
    assert space.ask("second") == ""
    space.run("first")
    kept = "which has ended and whose coordinator is kept for 600 s (spec.keepCoordinatorSeconds)"
    assert space.ask("second") == f"claim first-storage is in use by RLJob first, {kept}{REMEDY}"
    space.run("first", "Job", "trainer")
    assert "whose pods are being deleted" in space.ask("second")


def test_a_job_does_not_wait_for_a_failed_job_without_pods(space):
    space.add("first", 1, status=ENDED)
    space.run("first", "Job", "trainer", conditions=[{"type": "Failed", "status": "True"}])
    assert space.ask("second") == ""


def test_a_job_waits_for_a_younger_job_only_if_that_has_pods(space):
    space.add("first", 9)
    assert space.ask("second") == ""
    space.run("first")
    assert "RLJob first" in space.ask("second")


def test_a_job_with_pods_never_waits(space):
    space.add("first", 1)
    space.run("first")
    assert space.ask("second")
    space.run("second", "Job", "initializer")
    assert space.ask("second") == ""


@pytest.mark.parametrize(("uid", "waits"), [("a", True), ("z", False)])
def test_one_of_two_jobs_created_in_the_same_second_waits(space, uid, waits):
    space.add("first", 5, uid=uid)
    assert bool(space.ask("second")) is waits


@pytest.mark.parametrize(
    "other", [{"namespace": "other"}, {"storage": {"claim": "mine"}}, {"managedBy": "example.com/other"}]
)
def test_a_job_does_not_wait_for_another_claim_or_namespace(space, other):
    space.add("first", 1, **other)
    assert space.ask("second") == ""
