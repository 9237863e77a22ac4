"""Every field of the manifest has the effect that its metadata states, on one machine and in a cluster."""

import functools
import json
import os
from typing import get_args

import pytest

from e2e.fields import place
from e2e.fields.cluster import decisions, rendered
from e2e.fields.rows import KUBERNETES, ROWS, Changed, Refused, Shows
from rljob.api import crd
from rljob.api.errors import ManifestError
from rljob.api.explain import fields, to_data
from rljob.api.field_metadata import Reader, manifest_fields
from rljob.api.immutable import CHANGED, immutability, run_changes
from rljob.api.load import loads, override
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import write_yaml
from rljob.local import field_support
from rljob.manifests import problems
from rljob.manifests.hashes import Inputs

LISTS = {
    "spec.models": {},
    "spec.algorithm.teachers": {},
    "spec.tasks": {},
    "spec.tasks.messages": {},
    "spec.tasks.moreRewards": {"name": "near"},
    "spec.rewards": {},
    "spec.rollouts": {},
    "spec.environments": {"name": "made", "builtin": "frozen_lake"},
    "spec.network.allowFrom": {"name": "made"},
    "spec.network.egress.to": {"name": "made", "cidr": "10.0.0.0/16"},
    "spec.environments.egress.to": {"name": "made", "cidr": "10.0.0.0/16"},
    "spec.rewards.egress.to": {"name": "made", "cidr": "10.0.0.0/16"},
    "spec.network.nodes": {"name": "made", "cidr": "10.0.0.0/16"},
}
"""Lists of mappings → the entry that is added to an empty list."""


FIELDS = {field.name: field for field in manifest_fields(RLJob).values()}
"""Path without indices → metadata."""
LOCAL = ("spec.rewards.local.command", "spec.environments.local.command")
"""The fields that are supported on one machine only."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    os.environ["PYTHONHASHSEED"] = "0"
    directory = tmp_path_factory.mktemp("storage")
    place.write_storage(directory)
    return directory


def leaves():
    """Return the paths of all fields without nested fields."""
    known = list(fields())
    return [path for path in known if not any(other.startswith(f"{path}.") for other in known)]


def changed(path, value, given, storage, also=()):
    """Return two manifests as text: with ``given``, and also with ``also`` and ``value`` at ``path``."""
    data = place.manifest()
    for entry in given:
        override(data, entry.replace("make-", f"{storage}/make-"))
    before = write_yaml(data)
    for entry in also:
        override(data, entry)
    here, walked = data, []
    *parents, last = path.split(".")
    for step in parents:
        walked.append(step)
        made = LISTS.get(".".join(walked))
        here = here.setdefault(step, {} if made is None else [dict(made)])
        if made is not None:
            here = here[0]
    here[last] = json.loads(json.dumps(value).replace("make-", f"{storage}/make-"))
    return before, write_yaml(data)


@functools.cache
def _result_of(consumer, text, storage):
    return consumer(resolve(loads(text)), storage)


def test_every_field_has_a_row():
    assert set(leaves()) == set(ROWS)


@pytest.mark.parametrize("path", ROWS)
def test_a_field_makes_a_difference(path, storage):
    row = ROWS[path]
    before, after = changed(path, row.value, getattr(row, "given", ()), storage, getattr(row, "also", ()))
    assert before != after
    if isinstance(row, Refused) or refused(path):
        with pytest.raises(ManifestError) as caught:
            loads(after)
        problems_text = "\n".join(caught.value.problems)
        assert (row.cause if isinstance(row, Refused) else "not supported yet") in problems_text
        assert path.split(".")[1 if "." in path else 0] in problems_text
    elif FIELDS[path].local:
        assert isinstance(row, Changed)
        new = set(field_support.warnings(loads(after))) - set(field_support.warnings(loads(before)))
        assert new or field_support.warnings(loads(after)) == field_support.warnings(loads(before)) != []
    else:
        assert isinstance(row, Shows), "a field that one machine supports needs a consumer that shows its effect"
        assert _result_of(row.consumer, before, storage) != row.consumer(resolve(loads(after)), storage)


def refused(path):
    """Return whether the value of a field's row is not supported yet according to its metadata."""
    values = FIELDS[path].unsupported
    return values is True or ROWS[path].value in values


def test_every_field_has_one_reader():
    assert {field.reader for field in FIELDS.values()} <= set(get_args(Reader))


def test_a_run_continues_with_another_value_of_every_field_that_does_not_define_it(storage):
    """On one machine and in a cluster, where the API server rejects changes of more fields."""
    schema = crd.rljob()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = immutability(schema["properties"]["spec"])
    immutable = [
        f"{rule.at}{rule.field}".replace("[]", "")
        for rule in rules
        if " == oldSelf." in rule.rule and rule.message == CHANGED
    ]
    wrong = []
    for path, row in ROWS.items():
        if isinstance(row, Refused) or refused(path) or path.endswith(".name"):
            continue
        field = FIELDS[path]
        before, after = (
            to_data(loads(text)) for text in changed(path, row.value, row.given, storage, getattr(row, "also", ()))
        )
        if field.mutable == "raise":
            assert not list(run_changes(after, before)), f"{path}: its row must raise the value"
        if bool(list(run_changes(before, after))) != (field.defines_run or field.mutable == "raise"):
            wrong.append(f"{path}: whether a run can resume with another value contradicts its metadata")
        on_server = any(f"{path}.".startswith(f"{rule}.") for rule in immutable)
        if path.startswith("spec.") and on_server != (field.mutable == "never"):
            wrong.append(f"{path}: whether the API server accepts another value contradicts its metadata")
        if field.local and field.defines_run:
            wrong.append(f"{path}: has no effect on one machine and defines the run")
    assert not wrong, "\n".join(wrong)


def test_only_fields_that_processes_read_are_in_their_manifest(storage):
    """job.json has the fields of components and coordinator; the hash of other roles covers those of components."""
    wrong = []
    for path, row in ROWS.items():
        if isinstance(row, Refused) or refused(path) or not path.startswith("spec."):
            continue
        before, after = (
            Inputs(loads(text)) for text in changed(path, row.value, row.given, storage, getattr(row, "also", ()))
        )
        reader = FIELDS[path].reader
        if (before.parts != after.parts) != (reader in ("components", "coordinator")):
            wrong.append(f"{path}: its presence in job.json contradicts its reader {reader}")
        if (before.lasting != after.lasting) != (reader == "components"):
            wrong.append(f"{path}: its presence in the hash of every role contradicts its reader {reader}")
    assert not wrong, "\n".join(wrong)


OPERATOR = {path for path, field in FIELDS.items() if field.reader == "operator" and not field.group}
"""Fields that change the operator's decisions and not the rendered objects."""


def test_every_field_makes_a_difference_in_a_cluster(storage):
    """In the rendered objects, or in the operator's decisions if the operator reads the field."""
    rendered_once, decided_once = functools.cache(rendered_of), functools.cache(decisions_of)
    wrong = []
    for path, row in ROWS.items():
        if isinstance(row, Refused) or refused(path) or path in {*LOCAL, *KUBERNETES}:
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


@pytest.mark.parametrize("path", LOCAL)
def test_a_field_for_one_machine_is_rejected_in_a_cluster(path, storage):
    _, after = changed(path, ROWS[path].value, ROWS[path].given, storage)
    (problem,) = problems(loads(after))
    assert problem.startswith(f"{path.removesuffix('.local.command')}[0].local: is for rljob run")


FIRST_ROWS = {row.consumer: (path, row) for path, row in reversed(ROWS.items()) if isinstance(row, Shows)}


@pytest.mark.parametrize("consumer", sorted(FIRST_ROWS, key=str))
def test_a_consumer_gives_the_same_result_for_the_same_job(consumer, storage):
    path, row = FIRST_ROWS[consumer]
    text, _ = changed(path, row.value, row.given, storage, row.also)
    assert consumer(resolve(loads(text)), storage) == _result_of(consumer, text, storage)
