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
    "storage": "3e76b92adfc23601",
    "config": "2fd97c46c91d7281",
    "access": "5a4419a51fba3aae",
    "network": "cd088f22e2a4a4fe",
    "initializer": "7a9f8a016d3a33a3",
    "coordinator": "f8aeaa1a1ae2006c",
    "reward-gym": "67c3e8e004c4459c",
    "reward-judge": "e13dfa065fddbd7d",
    "runner": "5a4ddd2cb2afbd74",
    "trainer": "49ecb674bd8788ec",
    "rollout-main": "1882c8daaade1722",
    "claim": "052c4378b7922d3a",
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
