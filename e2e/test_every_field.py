"""Every field of the manifest changes something, is refused, or is said to have no effect here; and in a cluster."""

import functools
import json
import os

import pytest

from e2e.fields import place
from e2e.fields.cluster import decisions, rendered
from e2e.fields.rows import KUBERNETES, ROWS, Ignored, Refused, Shows
from rljob.api.errors import ManifestError
from rljob.api.explain import fields
from rljob.api.load import loads, override
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import write_yaml
from rljob.local import field_support
from rljob.manifests import problems

LISTS = {
    "spec.models": {},
    "spec.tasks": {},
    "spec.tasks.messages": {},
    "spec.rewards": {},
    "spec.rollouts": {},
    "spec.environments": {"name": "made", "builtin": "maze"},
    "spec.network.allowFrom": {"name": "made"},
    "spec.network.egress.to": {"name": "made", "cidr": "10.0.0.0/16"},
    "spec.network.nodes": {"name": "made", "cidr": "10.0.0.0/16"},
}
"""Lists of mappings → the entry made where there is none."""


LOCAL = "spec.rewards.local.command"
"""The field that is for one machine only."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    os.environ["PYTHONHASHSEED"] = "0"
    directory = tmp_path_factory.mktemp("storage")
    place.write_storage(directory)
    return directory


def leaves():
    """Return the paths of all fields that hold values and not fields of their own."""
    known = list(fields())
    return [path for path in known if not any(other.startswith(f"{path}.") for other in known)]


def changed(path, value, given, storage, also=()):
    """Return the manifest's text with ``given`` set, and with ``also`` and the field at ``path`` set besides."""
    data = place.manifest()
    for entry in given:
        override(data, entry.replace("make-", f"{storage}/make-"))
    before = write_yaml(data)
    for entry in also:
        override(data, entry)
    here, walked = data, []
    *way, last = path.split(".")
    for step in way:
        walked.append(step)
        made = LISTS.get(".".join(walked))
        here = here.setdefault(step, {} if made is None else [dict(made)])
        if made is not None:
            here = here[0]
    here[last] = json.loads(json.dumps(value).replace("make-", f"{storage}/make-"))
    return before, write_yaml(data)


@functools.cache
def _made_of(consumer, text, storage):
    return consumer(resolve(loads(text)), storage)


def test_every_field_has_a_row():
    assert set(leaves()) == set(ROWS)


@pytest.mark.parametrize("path", ROWS)
def test_a_field_makes_a_difference(path, storage):
    row = ROWS[path]
    before, after = changed(path, row.value, getattr(row, "given", ()), storage, getattr(row, "also", ()))
    assert before != after
    if isinstance(row, Refused):
        with pytest.raises(ManifestError) as caught:
            loads(after)
        said = "\n".join(caught.value.problems)
        assert row.said in said
        assert path.split(".")[1 if "." in path else 0] in said
    elif isinstance(row, Ignored):
        new = set(field_support.warnings(loads(after))) - set(field_support.warnings(loads(before)))
        assert new or field_support.warnings(loads(after)) == field_support.warnings(loads(before)) != []
    else:
        assert isinstance(row, Shows)
        assert _made_of(row.consumer, before, storage) != row.consumer(resolve(loads(after)), storage)


OPERATOR = {
    "spec.suspend",
    "spec.suspendGraceSeconds",
    "spec.failurePolicy.maxRestarts",
    "spec.failurePolicy.pendingSeconds",
    "spec.activeDeadlineSeconds",
    "spec.ttlSecondsAfterFinished",
    "spec.keepCoordinatorSeconds",
    "spec.managedBy",
}
"""Fields that decide what the operator does with the objects, and not what they are."""


def test_every_field_makes_a_difference_in_a_cluster(storage):
    """Of the rendered objects, or of the operator's decisions where the field is the operator's."""
    rendered_once, decided_once = functools.cache(rendered_of), functools.cache(decisions_of)
    wrong = []
    for path, row in ROWS.items():
        if isinstance(row, Refused) or path in {LOCAL, *KUBERNETES}:
            continue
        before, after = changed(path, row.value, row.given, storage, getattr(row, "also", ()))
        if (rendered_once(before) == rendered_of(after)) != (path in OPERATOR):
            wrong.append(f"{path}: an operator's field changes the objects, or another field does not")
        if path in OPERATOR and decided_once(before) == decisions_of(after):
            wrong.append(f"{path}: does not change the operator's decisions")
    assert not wrong, "\n".join(wrong)


def rendered_of(text):
    return rendered(loads(text))


def decisions_of(text):
    return decisions(loads(text))


def test_what_is_for_one_machine_only_is_refused_in_a_cluster(storage):
    _, after = changed(LOCAL, ROWS[LOCAL].value, ROWS[LOCAL].given, storage)
    (problem,) = problems(loads(after))
    assert problem.startswith("spec.rewards[0].local: is for rljob run")


@pytest.mark.parametrize("consumer", sorted({row.consumer for row in ROWS.values() if isinstance(row, Shows)}, key=str))
def test_what_is_compared_differs_by_the_job_alone(consumer, storage):
    text = write_yaml(place.manifest())
    assert consumer(resolve(loads(text)), storage) == _made_of(consumer, text, storage)
