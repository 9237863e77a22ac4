"""The metrics of jobs follow the status that a reconcile has written, without another reconcile."""

from collections import Counter

import msgspec
import pytest

from rljob.api.job_status import Condition, RLJobStatus, RoleStatus
from rljob.operator.cache import read_job
from rljob.operator.informers import Caches
from rljob.operator.load_sampler import LoadSampler
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import RLJOBS
from rljob.operator.plan import Plan
from rljob.operator.reconcile import Reconciler
from rljob.operator.recorder import Recorder

from .test_decoded_jobs import SPEC
from .world import CLUSTER

KEY = ("research", "sums")
NEWER = {"roles": [{"name": "trainer", "desired": 9, "ready": 0}]}


def job(version, status=None, uid="u"):
    meta = {"name": "sums", "namespace": "research", "uid": uid, "generation": 1, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": SPEC, "status": status or {}}


class Client:
    """An API server with one RLJob. ``during_apply`` runs before the answer of a write of the status."""

    def __init__(self):
        self.version, self.during_apply = 1, lambda: None

    async def apply(self, resource, namespace, name, body, subresource=""):
        assert (resource, subresource) == (RLJOBS, "status")
        self.version += 1
        answer = msgspec.json.encode(job(self.version, body["status"]))
        self.during_apply()
        return answer


class Planner:
    """Plans a Ready condition and the desired pods of a trainer."""

    def __init__(self):
        self.ready, self.trainers, self.record_first = "False", 2, False

    def __call__(self, observed, cluster):
        condition = Condition(
            type="Ready", status=self.ready, reason="Any", lastTransitionTime="2026-01-01T00:00:00Z", message=""
        )
        role = RoleStatus(name="trainer", desired=self.trainers, ready=0)
        return Plan(status=RLJobStatus(conditions=[condition], roles=[role]), record_first=self.record_first)

    def forget(self, uid):
        """Keep nothing."""


class Operator:
    """A reconciler of one RLJob."""

    def __init__(self):
        self.client, self.planner = Client(), Planner()
        metrics = Metrics()
        ignore = {"on_change": lambda key: None, "on_pod": lambda key: None}
        self.caches = Caches(self.client, (), metrics=metrics, **ignore)
        self.caches.jobs.take(read_job(msgspec.json.encode(job(1))))
        sampler = LoadSampler(self.caches.jobs, lambda key: None, lambda: 0.0)
        recorder = Recorder(self.client, metrics, "operator-1")
        self.reconciler = Reconciler(self.client, self.caches, CLUSTER, self.planner, recorder, sampler)

    def counted(self):
        return Counter(self.reconciler.conditions()), dict(self.reconciler.desired_pods())


@pytest.fixture
def operator():
    return Operator()


@pytest.mark.parametrize("record_first", [False, True])
async def test_metrics_have_the_status_that_was_written_last(operator, record_first):
    operator.planner.record_first = record_first
    await operator.reconciler.reconcile(KEY)
    assert operator.counted() == ({("Ready", "False"): 1}, {"trainer": 2})
    operator.planner.ready, operator.planner.trainers = "True", 3
    await operator.reconciler.reconcile(KEY)
    assert operator.counted() == ({("Ready", "True"): 1}, {"trainer": 3})


async def test_metrics_have_a_newer_status_that_the_watch_delivered_before_the_answer(operator):
    operator.client.during_apply = lambda: operator.caches.jobs.put(msgspec.json.encode(job(8, NEWER)))
    await operator.reconciler.reconcile(KEY)
    assert operator.counted() == ({}, {"trainer": 9})


async def test_a_job_that_was_replaced_during_the_write_and_is_deleted_is_not_counted(operator):
    again = msgspec.json.encode(job(9, NEWER, uid="v"))

    def replace():
        operator.caches.jobs.deleted(*KEY, "u")
        operator.caches.jobs.put(again)

    operator.client.during_apply = replace
    await operator.reconciler.reconcile(KEY)
    operator.caches.jobs.deleted(*KEY, "v")
    await operator.reconciler.reconcile(KEY)
    assert operator.counted() == ({}, {})
