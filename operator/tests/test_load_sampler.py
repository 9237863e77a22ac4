"""Loads are sampled beside the reconciles, kept for the longest window, and forgotten when the replicas change."""

import json

import pytest

from rljob.operator.cache import Cache, read_job
from rljob.operator.load_sampler import LONGEST_GAP_SECONDS, LoadSampler
from rljob.operator.object_kinds import RLJOBS
from rljob.operator.scale_policy import SampledRole, ScalePolicy

KEY = ("default", "sums")
POLICY = ScalePolicy(target=8, minimum=1, maximum=4, out_seconds=30, in_seconds=60)


class Jobs:
    """One RLJob in a cache, a clock, and the jobs whose replicas should change."""

    def __init__(self):
        self.now, self.version, self.due = 1000.0, 0, []
        self.cache = Cache(RLJOBS, read_job)
        self.sampler = LoadSampler(self.cache, self.due.append, lambda: self.now)

    def report(self, loads, uid="uid"):
        self.version += 1
        meta = {"name": "sums", "namespace": "default", "uid": uid, "resourceVersion": str(self.version)}
        run = {"state": "Running", "loads": [{"role": role, "load": load} for role, load in loads.items()]}
        self.cache.put(json.dumps({"metadata": meta, "spec": {}, "status": {"run": run}}).encode())

    def register(self, policy=POLICY, replicas=1):
        self.sampler.register(KEY, "uid", {"reward-exact": SampledRole(policy, policy.clamp(replicas))})

    def spend(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1
            self.sampler.sample()

    def points(self, replicas=1):
        return self.sampler.loads("uid", {"reward-exact": replicas}).get("reward-exact", ())


@pytest.fixture
def jobs():
    made = Jobs()
    made.report({"reward-exact": 30})
    made.register()
    return made


def test_a_job_is_reconciled_once_its_load_has_lasted_for_the_window(jobs):
    jobs.spend(30)
    assert jobs.due == []
    jobs.spend(12)
    assert jobs.due[0] == KEY
    assert [point.load for point in jobs.points()] == [30] * 5


def test_the_points_cover_the_longest_window_and_no_more(jobs):
    jobs.report({"reward-exact": 8})
    jobs.spend(600)
    assert jobs.due == []
    points = jobs.points()
    assert points[0].at <= jobs.now - POLICY.in_seconds < points[1].at


@pytest.mark.parametrize("change", [{"replicas": 2}, {"policy": ScalePolicy(9, 1, 4, 30, 60)}])
def test_points_end_with_the_replicas_and_the_policy(jobs, change):
    jobs.spend(20)
    jobs.register()
    assert jobs.points(), "the same registration keeps them"
    assert not jobs.points(replicas=2)
    jobs.register(**change)
    assert not jobs.points(change.get("replicas", 1))


def test_replicas_outside_of_the_bounds_count_as_the_bound(jobs):
    jobs.register(replicas=99)
    jobs.report({"reward-exact": 32})
    jobs.spend(100)
    assert jobs.due == []
    assert jobs.points(replicas=50)


def test_a_gap_ends_the_points(jobs):
    jobs.spend(25)
    jobs.now += LONGEST_GAP_SECONDS + 20
    jobs.sampler.sample()
    assert len(jobs.points()) == 1
    jobs.now -= 4000
    jobs.sampler.sample()
    assert len(jobs.points()) == 1, "the clock went back"


def test_without_a_load_or_a_job_nothing_is_kept(jobs):
    jobs.spend(25)
    jobs.report({})
    jobs.spend(10)
    assert not jobs.points()
    jobs.report({"reward-exact": 30}, uid="another")
    jobs.spend(100)
    assert not jobs.points() and jobs.due == []
    jobs.sampler.register(KEY, "uid", {})
    assert jobs.sampler.loads("uid", {"reward-exact": 1}) == {}


def test_a_status_that_cannot_be_decoded_is_skipped(jobs):
    jobs.version += 1
    meta = {"name": "sums", "namespace": "default", "uid": "uid", "resourceVersion": str(jobs.version)}
    jobs.cache.put(json.dumps({"metadata": meta, "status": {"run": {"loads": 3}}}).encode())
    jobs.spend(30)
    assert not jobs.points() and jobs.due == []
