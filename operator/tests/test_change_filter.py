"""Which changes of an RLJob have it decided on again."""

import msgspec
import pytest

from rljob.operator.api_types import Meta
from rljob.operator.cache import SeenJob
from rljob.operator.change_filter import is_relevant

RUN = {"state": "Running", "progress": {"step": 1}, "engines": [{"name": "a", "load": 1}], "observedGeneration": 1}
STATUS = {"observedGeneration": 1, "conditions": [{"type": "Ready"}], "draining": [], "run": RUN}


def seen(status=STATUS, **meta):
    return SeenJob(
        Meta(name="sums", uid="u", **{"generation": 1, **meta}), status=msgspec.Raw(msgspec.json.encode(status))
    )


def with_run(status=STATUS, **changes):
    return {**status, "run": {**RUN, **changes}}


@pytest.mark.parametrize(
    "changed",
    [
        seen(with_run(progress={"step": 2})),
        seen(with_run(metrics=[{"name": "x", "value": 1}])),
        seen(with_run(engines=[{"name": "a", "load": 9}])),
        seen(resource_version="9"),
    ],
    ids=["progress", "metrics", "engines", "version"],
)
def test_what_a_coordinator_reports_for_people_does_not_matter(changed):
    assert not is_relevant(seen(), changed)


@pytest.mark.parametrize(
    "changed",
    [
        seen(generation=2),
        seen(labels={"a": "b"}),
        seen(annotations={"a": "b"}),
        seen(deletion_timestamp="2026-01-01T00:00:00Z"),
        seen({**STATUS, "conditions": []}),
        seen({**STATUS, "suspendedAt": "2026-01-01T00:00:00Z"}),
        seen({name: value for name, value in STATUS.items() if name != "run"}),
        seen(with_run(state="Succeeded")),
        seen(with_run(reason="Broken")),
        seen(with_run(message="it broke")),
        seen(with_run(observedGeneration=2)),
    ],
)
def test_what_decisions_read_matters(changed):
    assert is_relevant(seen(), changed) and is_relevant(changed, seen())


def test_engines_matter_while_some_are_drained():
    draining = {**STATUS, "draining": ["a"]}
    done = with_run(draining, engines=[{"name": "a", "load": 0, "drained": True}])
    assert is_relevant(seen(draining), seen(done))
    assert not is_relevant(seen(draining), seen(with_run(draining, progress={"step": 2})))
