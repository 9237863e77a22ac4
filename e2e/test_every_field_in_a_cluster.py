"""Every field of the manifest that `rljob run` honours or ignores changes what is rendered for a cluster, or is read by
the operator itself. The values are those of e2e/fields/rows.py, so that the two tables cannot drift apart."""

import pytest

from e2e.fields.rows import KUBERNETES, ROWS, Ignored, Refused
from e2e.test_every_field import changed
from rljob.api.load import loads
from rljob.manifests import problems, render
from rljob.manifests.inputs import Context

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
HASHES = ("rljob.dev/role-hash", "rljob.dev/rendered-hash")

RENDERED = [path for path, row in ROWS.items() if not isinstance(row, Refused) and path not in KUBERNETES]


def rendered(text):
    """Return the objects of a job without the hashes, which are no field's effect."""
    return [_bare(o) for role in render(loads(text), Context(uid="u")) for o in role.objects]


def _bare(value):
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items() if key not in HASHES}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", RENDERED)
def test_a_field_changes_the_objects_or_is_the_operators(path):
    row = ROWS[path]
    before, after = changed(path, row.value, row.given, "/storage", getattr(row, "also", ()))
    if path in OPERATOR:
        assert rendered(before) == rendered(after)
    else:
        assert rendered(before) != rendered(after)


def test_what_one_machine_ignores_is_used_in_a_cluster():
    ignored = {path for path, row in ROWS.items() if isinstance(row, Ignored)}
    assert ignored - OPERATOR - KUBERNETES <= set(RENDERED)


def test_what_only_one_machine_honours_is_refused_in_a_cluster():
    _, after = changed("spec.rewards.local.command", ["./serve"], ROWS["spec.rewards.local.command"].given, "/storage")
    assert [problem.partition(":")[0] for problem in problems(loads(after))] == ["spec.rewards[0].local"]
