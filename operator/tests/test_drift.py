"""Which differences between a live object and its rendering count."""

import copy

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.operator.cache import child_reader
from rljob.operator.drift import differing_fields, differs, replicas_of, same_rendering, same_role

RENDERED = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {
        "name": "sums-runner",
        "namespace": "research",
        "labels": {"rljob.dev/job": "sums"},
        "annotations": {"rljob.dev/role-hash": "r1", "rljob.dev/rendered-hash": "i1"},
        "ownerReferences": [{"kind": "RLJob", "name": "sums", "uid": "u1", "controller": True}],
    },
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"rljob.dev/job": "sums"}},
        "template": {
            "spec": {
                "hostNetwork": False,
                "securityContext": {},
                "containers": [
                    {
                        "name": "main",
                        "image": "rljob-runner",
                        "imagePullPolicy": "",
                        "command": ["python", "-m", "rljob.runner.main"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": ""}],
                        "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}},
                        "volumeMounts": [{"name": "job", "mountPath": "/etc/rljob/job"}],
                    }
                ],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
            }
        },
    },
}


def live(**containers):
    """Return the object as an API server might store it."""
    body = copy.deepcopy(RENDERED)
    body["metadata"] |= {"uid": "x", "resourceVersion": "7", "generation": 1}
    pod = body["spec"]["template"]["spec"]
    del pod["hostNetwork"]
    pod |= {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
    main = pod["containers"][0]
    main["imagePullPolicy"] = "IfNotPresent"
    main["resources"] = {"limits": {"cpu": "0.5", "memory": "1024Mi"}}
    main["env"] = [{"name": "INJECTED", "value": "x"}, {"name": "B"}, {"name": "A", "value": "1"}]
    pod["containers"].append({"name": "sidecar", "image": "mesh"})
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = "1073741824"
    main.update(containers)
    return body


def test_defaults_sidecars_injected_variables_and_equal_quantities_are_equal():
    assert differing_fields(RENDERED, live()) == frozenset()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"image": "other"}, "spec/template/spec/containers/main/image"),
        ({"command": ["sh"]}, "spec/template/spec/containers/main/command"),
        ({"env": [{"name": "A", "value": "2"}, {"name": "B"}]}, "spec/template/spec/containers/main/env/A/value"),
        ({"env": [{"name": "B"}]}, "spec/template/spec/containers/main/env/A/name"),
        ({"resources": {"limits": {"cpu": "2", "memory": "1Gi"}}}, "spec/template/spec/containers/main/resources"),
        ({"volumeMounts": []}, "spec/template/spec/containers/main/volumeMounts"),
    ],
)
def test_a_change_of_a_rendered_field_is_a_difference(change, path):
    found = {"/".join(map(str, each)) for each in differing_fields(RENDERED, live(**change))}
    assert found and all(each.startswith(path.rpartition("/")[0]) for each in found)


def test_a_list_without_merge_keys_is_compared_as_a_value():
    assert differs({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}, {"key": "a"}]})
    assert differs({"args": ["a", "b"]}, {"args": ["b", "a"]})
    assert not differs({"args": ["a", "b"]}, {"args": ["a", "b"]})


def test_an_additional_key_in_a_selector_is_a_difference():
    assert differs({"spec": {"selector": {"a": "1"}}}, {"spec": {"selector": {"a": "1", "b": "2"}}})
    assert differs({"selector": {"matchLabels": {"a": "1"}}}, {"selector": {"matchLabels": {"a": "1", "b": "2"}}})
    assert not differs({"labels": {"a": "1"}}, {"labels": {"a": "1", "b": "2"}})


def test_replicas_and_status_are_not_compared():
    body = live()
    body["spec"]["replicas"] = 9
    body["status"] = {"readyReplicas": 1}
    assert differing_fields({**RENDERED, "status": {"readyReplicas": 2}}, body) == frozenset()
    assert replicas_of(body) == 9 and replicas_of({"data": {}}) is None


def test_a_removed_label_annotation_or_owner_is_a_difference():
    for field in ("labels", "annotations", "ownerReferences"):
        body = live()
        del body["metadata"][field]
        assert differing_fields(RENDERED, body)


def test_a_value_instead_of_a_rendered_empty_value_is_a_difference_but_a_default_is_not():
    assert differs({"hostNetwork": False}, {"hostNetwork": True})
    assert differs({"podSelector": {}}, {"podSelector": {"matchLabels": {"a": "b"}}})
    assert differs({"ingress": []}, {"ingress": [{}, {"from": [{}]}]})
    assert not differs({"serviceAccountName": ""}, {"serviceAccountName": "default"})


def test_role_hash_and_rendered_hash_are_compared_by_annotation():
    child = child_reader("Deployment")(msgspec.json.encode(live()))
    assert same_role(RENDERED, child) and same_rendering(RENDERED, child)
    other = copy.deepcopy(RENDERED)
    other["metadata"]["annotations"]["rljob.dev/rendered-hash"] = "i2"
    assert same_role(other, child) and not same_rendering(other, child)


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        ({"automountServiceAccountToken": False}, {}),
        ({"securityContext": {"allowPrivilegeEscalation": False}}, {"securityContext": {}}),
        ({"securityContext": {"allowPrivilegeEscalation": False}}, {}),
        ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, {"volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]}),
    ],
)
def test_removing_a_significant_empty_value_is_a_difference(wanted, there):
    assert differs(wanted, there)
    assert not differs(wanted, wanted)


def test_a_removed_rendered_hash_is_not_taken_for_another_version():
    body = live()
    del body["metadata"]["annotations"]["rljob.dev/rendered-hash"]
    child = child_reader("Deployment")(msgspec.json.encode(body))
    assert same_rendering(RENDERED, child) and differing_fields(RENDERED, body)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("abc", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_every_value_equals_itself(value):
    assert not differs({"spec": value}, {"spec": value})


@given(
    st.dictionaries(st.sampled_from("xyz"), values, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from("uvw"), values),
)
def test_added_fields_are_no_difference(wanted, added):
    assert not differs(wanted, {**wanted, **added})
