"""The claims of a job: class and access modes, and the ledger on a volume of its own."""

import pytest

from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.manifests import render
from rljob.manifests.inputs import Cluster, RenderTarget

CLUSTER = Cluster(storage_class="efs", access_modes=("ReadWriteMany",), storage_size="2Ti")


def roles(manifest, **storage):
    manifest["spec"]["storage"] = storage
    return {role.name: role for role in render(validate(manifest), RenderTarget(CLUSTER, uid="uid"))}


def claims(manifest, **storage):
    return {each["metadata"]["name"]: each for each in roles(manifest, **storage)["storage"].objects}


def pods(found):
    for role in found.values():
        for each in role.objects:
            if "template" in each.get("spec", {}):
                yield role.kind, each["spec"]["template"]["spec"]


def test_the_claim_has_the_class_and_the_access_modes_of_the_job(manifest):
    default = claims(manifest)["sums-storage"]["spec"]
    assert default["storageClassName"] == "efs" and default["accessModes"] == ["ReadWriteMany"]
    given = claims(manifest, className="gp3", accessModes=["ReadWriteOnce"])["sums-storage"]["spec"]
    assert given["storageClassName"] == "gp3" and given["accessModes"] == ["ReadWriteOnce"]


def test_the_ledger_has_a_claim_of_its_own_with_the_default_class_of_the_cluster(manifest):
    found = claims(manifest, ledger={})
    assert [*found] == ["sums-storage", "sums-ledger"]
    assert found["sums-ledger"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
    }
    found = claims(manifest, ledger={"size": "1Gi", "className": "gp3"})
    assert found["sums-ledger"]["spec"]["storageClassName"] == "gp3"
    assert found["sums-ledger"]["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    assert [*claims(manifest, claim="mine", ledger={})] == ["sums-ledger"]


@pytest.mark.parametrize("retention", ["Retain", "Delete"])
def test_both_claims_are_kept_or_deleted_together(manifest, retention):
    found = claims(manifest, ledger={}, retention=retention).values()
    assert {"ownerReferences" in each["metadata"] for each in found} == {retention == "Delete"}
    assert len({each["metadata"]["annotations"]["rljob.dev/spec-hash"] for each in found}) == 1


def test_only_the_coordinator_mounts_the_ledger(manifest):
    found = roles(manifest, ledger={})
    mounting = {
        kind: [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
        for kind, pod in pods(found)
    }
    assert mounting.pop("coordinator") == ["sums-storage", "sums-ledger"]
    assert {name for names in mounting.values() for name in names} == {"sums-storage"}
    (container,) = next(pod for kind, pod in pods(found) if kind == "coordinator")["containers"]
    path = next(each["value"] for each in container["env"] if each["name"] == "RLJOB_LEDGER")
    assert {"name": "rljob-ledger", "mountPath": path} in container["volumeMounts"]


def test_without_the_field_the_ledger_is_in_the_storage(manifest):
    assert not [name for name in claims(manifest) if "ledger" in name]
    assert "RLJOB_LEDGER" not in str(roles(manifest)["coordinator"].objects)


def test_a_volume_of_its_own_restarts_no_role(manifest):
    """The field cannot change; but a role's hash must not depend on it, or an upgrade would restart pods."""
    before, after = roles(manifest), roles(manifest, ledger={})
    assert {name: role.hash for name, role in before.items()} == {name: role.hash for name, role in after.items()}


@pytest.mark.parametrize(
    ("storage", "sentence"),
    [
        ({"claim": "a", "className": "b"}, "spec.storage.claim: className is given too; a storage has one of"),
        ({"claim": "a", "accessModes": ["ReadWriteMany"]}, "spec.storage.claim: accessModes is given too"),
        ({"accessModes": ["ReadOnlyMany"]}, "spec.storage.accessModes[0]: must be 'ReadWriteOnce'"),
        ({"accessModes": []}, "spec.storage.accessModes: must have at least 1 entry, not 0"),
        ({"className": "Fast"}, "spec.storage.className: must consist of lower-case letters"),
        ({"ledger": {"size": "much"}}, "spec.storage.ledger.size: must be an amount such as 10Gi"),
        ({"ledger": {"class": "a"}}, "spec.storage.ledger.class: unknown field; did you mean className?"),
    ],
)
def test_a_wrong_value_is_refused_by_name(manifest, storage, sentence):
    manifest["spec"]["storage"] = storage
    with pytest.raises(ManifestError) as refusal:
        validate(manifest)
    assert sentence in str(refusal.value)
