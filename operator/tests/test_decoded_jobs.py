"""Decoding of RLJobs: a manifest once per generation, a status without its invalid parts."""

import msgspec

from rljob.api.job_status import RLJobStatus
from rljob.operator.api_types import Meta
from rljob.operator.cache import CachedJob
from rljob.operator.decoded_jobs import DecodedJobs, read_status

SPEC = {
    "models": [{"name": "policy", "source": "job://model"}],
    "training": {"steps": 5},
    "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"}],
    "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
    "rollouts": [{"name": "main"}],
}


def cached(generation=1, version="1", name="sums", status=None, **spec):
    raw = msgspec.json.encode
    meta = Meta(name=name, namespace="n", uid="u", generation=generation, resource_version=version)
    return CachedJob(meta, msgspec.Raw(raw({**SPEC, **spec})), msgspec.Raw(raw(status or {})))


def test_a_manifest_is_read_once_for_each_generation():
    jobs = DecodedJobs()
    first, _ = jobs.read(cached())
    again, status = jobs.read(cached(version="2", status={"observedGeneration": 1}))
    assert again.job is first.job and first.job is not None and status.observed_generation == 1
    other, _ = jobs.read(cached(generation=2, version="3"))
    assert other.job is not first.job


def test_errors_of_a_manifest_are_sentences():
    manifest, _ = DecodedJobs().read(cached(rollouts=[]))
    assert manifest.job is None and "spec.rollouts" in manifest.problems[0]
    manifest, _ = DecodedJobs().read(cached(name="1.sums"))
    assert "metadata.name" in manifest.problems[0]


def test_a_job_of_this_operator_is_not_managed_by_another_one():
    assert not DecodedJobs().read(cached(managedBy="rljob.dev/operator"))[0].managed


def test_managed_by_is_recognized_in_an_invalid_manifest():
    manifest, _ = DecodedJobs().read(cached(rollouts=[], managedBy="example.com/other"))
    assert manifest.managed
    assert not DecodedJobs().read(cached())[0].managed


def test_invalid_parts_of_a_status_are_dropped_and_the_rest_is_kept():
    attempt = {"number": 3, "startedAt": "2026-01-01T00:00:00Z", "mood": "good"}
    condition = {"type": "Ready", "status": "True", "reason": "Running", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    raw = msgspec.json.encode(
        {"trainer": attempt, "colour": "green", "conditions": [condition, {**condition, "type": "Dreaming"}]}
    )
    status = read_status(raw)
    assert status.trainer.number == 3
    assert [each.type for each in status.conditions] == ["Ready"]


def test_an_invalid_status_is_treated_as_empty():
    assert read_status(b'{"trainer": "yes", "roles": 3}') == RLJobStatus()
