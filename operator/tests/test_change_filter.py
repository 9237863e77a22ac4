"""Which changes of an RLJob trigger a reconcile."""

import msgspec
import pytest

from rljob.operator.api_types import Meta
from rljob.operator.cache import CachedJob
from rljob.operator.change_filter import is_relevant, others_changed

RUN = {"state": "Running", "progress": {"step": 1}, "engines": [{"name": "a", "load": 1}], "observedGeneration": 1}
STATUS = {"observedGeneration": 1, "conditions": [{"type": "Ready"}], "draining": [], "run": RUN}


def cached(status=STATUS, **meta):
    return CachedJob(
        Meta(name="sums", uid="u", **{"generation": 1, **meta}), status=msgspec.Raw(msgspec.json.encode(status))
    )


def with_run(status=STATUS, **changes):
    return {**status, "run": {**RUN, **changes}}


@pytest.mark.parametrize(
    "changed",
    [
        cached(with_run(progress={"step": 2})),
        cached(with_run(metrics=[{"name": "x", "value": 1}])),
        cached(with_run(engines=[{"name": "a", "load": 9}])),
        cached(resource_version="9"),
    ],
    ids=["progress", "metrics", "engines", "version"],
)
def test_fields_that_are_only_for_users_are_not_relevant(changed):
    assert not is_relevant(cached(), changed)


@pytest.mark.parametrize(
    "changed",
    [
        cached(generation=2),
        cached(labels={"a": "b"}),
        cached(annotations={"a": "b"}),
        cached(deletion_timestamp="2026-01-01T00:00:00Z"),
        cached({**STATUS, "conditions": []}),
        cached({**STATUS, "suspendedAt": "2026-01-01T00:00:00Z"}),
        cached({name: value for name, value in STATUS.items() if name != "run"}),
        cached(with_run(state="Succeeded")),
        cached(with_run(reason="Broken")),
        cached(with_run(message="it broke")),
        cached(with_run(observedGeneration=2)),
    ],
)
def test_fields_that_planning_reads_are_relevant(changed):
    assert is_relevant(cached(), changed) and is_relevant(changed, cached())


def test_engines_are_relevant_while_some_are_drained():
    draining = {**STATUS, "draining": ["a"]}
    done = with_run(draining, engines=[{"name": "a", "load": 0, "drained": True}])
    assert is_relevant(cached(draining), cached(done))
    assert not is_relevant(cached(draining), cached(with_run(draining, progress={"step": 2})))


def test_the_operators_own_part_of_the_status_is_no_change_of_others():
    """The answer to its own write: a change of others in it would otherwise be lost, as its event comes later."""
    own = {**STATUS, "conditions": [], "suspendedAt": "2026-01-01T00:00:00Z"}
    assert not others_changed(cached(), cached(own))
    assert others_changed(cached(), cached(with_run(own, state="Suspended")))
    assert others_changed(cached(), cached(own, generation=2))
