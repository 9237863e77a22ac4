"""Hashes of jobs as the API server has stored them: with every default of the CRD at that time.

An upgrade changes no pod of a running job as long as the hashes of the job do not change
(docs/decisions/0013-operator-writes.md). The stored manifest and the hashes are of v1alpha1 and never change.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from core.tests.goldens import JOB
from rljob.api import crd
from rljob.api.load import validate
from rljob.manifests import render
from rljob.manifests.hashes import spec_hash
from rljob.manifests.inputs import RenderTarget

STORED = Path(__file__).parent / "stored" / "v1alpha1.yaml"
"""The job of the golden files as an API server stored it."""
HASHES = {
    "storage": "b81d5bd88c84cb7e",
    "config": "6514252c923fe620",
    "access": "026ee9fb4cdd995c",
    "network": "70c6d0c297c03a08",
    "initializer": "48b2e70a084cdc1f",
    "coordinator": "e654448bf75a8707",
    "reward-gym": "4c885502b8cfc6d8",
    "reward-judge": "48ab4be9c13f9647",
    "runner": "959a33986dd2f8d5",
    "trainer": "528a729666e3622b",
    "rollout-main": "73a8e8e61ec03513",
    "claim": "8980d8a425a042cc",
}
WARNING = (
    "an upgrade to this version would restart this role of every running job: a default, or the set of hashed fields, "
    "has changed; give a new default to new API versions only (never to v1alpha1), or leave the field out of the hash"
)


def read(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(path.read_text())
    return body


def stored(schema: dict[str, Any], value: Any) -> Any:
    """Return ``value`` with the schema's defaults, as an API server fills them in."""
    if isinstance(value, list):
        return [stored(schema.get("items", {}), entry) for entry in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    found = {name: field["default"] for name, field in fields.items() if "default" in field and name not in value}
    return {name: stored(fields.get(name, {}), entry) for name, entry in {**value, **found}.items()}


def hashes(manifest: dict[str, Any]) -> dict[str, str]:
    job = validate(manifest)
    found = {role.name: role.hash for role in render(job, RenderTarget(uid="uid"))}
    return {**found, "claim": spec_hash(job)}


@pytest.mark.parametrize("role", HASHES)
def test_the_hash_of_a_stored_job_does_not_change(role):
    assert hashes(read(STORED))[role] == HASHES[role], WARNING


def test_every_role_of_the_stored_job_has_a_frozen_hash():
    assert HASHES.keys() == hashes(read(STORED)).keys()


def test_the_stored_job_has_the_same_hashes_as_the_users_job():
    schema = crd.rljob()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    manifest = read(JOB)
    filled = stored(schema, manifest)
    assert filled["spec"]["weightSync"] != manifest["spec"].get("weightSync")  # the defaults were filled in
    assert hashes(filled) == hashes(manifest)


def test_a_changed_default_changes_the_hash():
    manifest = read(STORED)
    manifest["spec"]["weightSync"]["timeoutSeconds"] = 61.0
    assert hashes(manifest)["trainer"] != HASHES["trainer"]
