"""Ownership of objects and of their fields."""

import pytest

from rljob.operator.api_types import Meta, OwnerReference
from rljob.operator.ownership import applied_fields, foreign_scaler, foreign_sentence, is_ours

JOB = Meta(name="sums", namespace="research", uid="u1")


def owned(uid, kind="RLJob", name="sums", **more):
    owner = OwnerReference(kind=kind, name=name, uid=uid, controller=True)
    return Meta(name="sums-x", labels={"rljob.dev/job": "sums"}, owner_references=[owner], **more)


def test_an_object_is_ours_if_the_job_controls_it_or_it_is_a_claim_without_controller():
    assert is_ours(JOB, "Deployment", owned("u1"))
    assert not is_ours(JOB, "Deployment", owned("u0"))
    unowned = Meta(name="sums-x", labels={"rljob.dev/job": "sums"})
    assert not is_ours(JOB, "Deployment", unowned)
    assert is_ours(JOB, "PersistentVolumeClaim", unowned)
    assert not is_ours(JOB, "PersistentVolumeClaim", Meta(name="sums-x"))


def test_a_foreign_object_is_reported_with_its_owner_and_the_remedy():
    assert "an earlier RLJob of this name" in foreign_sentence(JOB, "Service", owned("u0"))
    assert "still being deleted" in foreign_sentence(JOB, "Service", owned("u0", deletion_timestamp="2026-01-01"))
    assert "Sandwich lunch" in foreign_sentence(JOB, "Service", owned("u9", "Sandwich", "lunch"))
    assert "delete it" in foreign_sentence(JOB, "Service", Meta(name="sums-x"))


def test_created_fields_become_applied_fields():
    entries = [
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:a": {}}},
        {"manager": "rljob-operator", "operation": "Apply", "apiVersion": "v1", "fieldsV1": {"f:b": {"f:c": {}}}},
        {"manager": "rljob-operator", "operation": "Update", "apiVersion": "v1", "fieldsV1": {"f:b": {"f:d": {}}}},
        {"manager": "rljob-operator", "operation": "Update", "subresource": "status", "fieldsV1": {"f:s": {}}},
    ]
    fields = applied_fields(entries)
    ours = [entry for entry in fields if entry["manager"] == "rljob-operator" and not entry.get("subresource")]
    assert len(ours) == 1 and ours[0]["operation"] == "Apply"
    assert ours[0]["fieldsV1"] == {"f:b": {"f:c": {}, "f:d": {}}}
    assert entries[0] in fields and entries[3] in fields
    assert applied_fields(fields) is None


REPLICAS = {"f:spec": {"f:replicas": {}}}


@pytest.mark.parametrize(
    ("entries", "owner"),
    [
        ([], ""),
        ([{"manager": "rljob-operator", "operation": "Update", "fieldsV1": REPLICAS}], ""),
        ([{"manager": "rljob-autoscaler", "operation": "Apply", "fieldsV1": REPLICAS}], ""),
        ([{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:job": {}}}}], ""),
        ([{"manager": "kubectl", "subresource": "scale", "fieldsV1": REPLICAS}], "kubectl"),
        (
            [
                {"manager": "rljob-operator", "fieldsV1": REPLICAS},
                {"manager": "kube-controller-manager", "subresource": "scale", "fieldsV1": REPLICAS},
            ],
            "kube-controller-manager",
        ),
        ([{"fieldsV1": REPLICAS}], "something else"),
    ],
)
def test_the_owner_of_replicas_is_what_changed_them_last_other_than_the_operator(entries, owner):
    assert foreign_scaler(entries) == owner
