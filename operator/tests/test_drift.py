"""What counts as a departure of a live object from the rendered one."""

import copy

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.operator.cache import child_reader
from rljob.operator.drift import departs, departures, replicas_of, same_rendering, same_role

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
    """Return the object as an API server might have it."""
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


def test_defaults_sidecars_injected_variables_and_equal_quantities_are_no_departure():
    assert departures(RENDERED, live()) == frozenset()


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
def test_a_change_of_what_we_render_is_a_departure(change, path):
    found = {"/".join(map(str, each)) for each in departures(RENDERED, live(**change))}
    assert found and all(each.startswith(path.rpartition("/")[0]) for each in found)


def test_a_list_that_is_no_map_is_a_value():
    assert departs({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}, {"key": "a"}]})
    assert departs({"args": ["a", "b"]}, {"args": ["b", "a"]})
    assert not departs({"args": ["a", "b"]}, {"args": ["a", "b"]})


def test_a_key_more_in_a_selector_is_a_departure():
    assert departs({"spec": {"selector": {"a": "1"}}}, {"spec": {"selector": {"a": "1", "b": "2"}}})
    assert departs({"selector": {"matchLabels": {"a": "1"}}}, {"selector": {"matchLabels": {"a": "1", "b": "2"}}})
    assert not departs({"labels": {"a": "1"}}, {"labels": {"a": "1", "b": "2"}})


def test_replicas_and_status_do_not_count():
    body = live()
    body["spec"]["replicas"] = 9
    body["status"] = {"readyReplicas": 1}
    assert departures({**RENDERED, "status": {"readyReplicas": 2}}, body) == frozenset()
    assert replicas_of(body) == 9 and replicas_of({"data": {}}) is None


def test_a_removed_label_annotation_or_owner_is_a_departure():
    for field in ("labels", "annotations", "ownerReferences"):
        body = live()
        del body["metadata"][field]
        assert departures(RENDERED, body)


def test_setting_what_is_rendered_empty_is_a_departure_but_a_default_where_nothing_is_said_is_none():
    assert departs({"hostNetwork": False}, {"hostNetwork": True})
    assert departs({"podSelector": {}}, {"podSelector": {"matchLabels": {"a": "b"}}})
    assert departs({"ingress": []}, {"ingress": [{}, {"from": [{}]}]})
    assert not departs({"serviceAccountName": ""}, {"serviceAccountName": "default"})


def test_role_and_intent_are_compared_by_annotation():
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
def test_removing_what_is_not_the_default_though_it_looks_empty_is_a_departure(wanted, there):
    assert departs(wanted, there)
    assert not departs(wanted, wanted)


def test_removing_the_annotation_of_the_intent_does_not_pass_for_another_version():
    body = live()
    del body["metadata"]["annotations"]["rljob.dev/rendered-hash"]
    child = child_reader("Deployment")(msgspec.json.encode(body))
    assert same_rendering(RENDERED, child) and departures(RENDERED, body)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("abc", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)


@given(values)
def test_nothing_departs_from_itself(value):
    assert not departs({"spec": value}, {"spec": value})


@given(
    st.dictionaries(st.sampled_from("xyz"), values, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from("uvw"), values),
)
def test_added_fields_are_no_departure(wanted, added):
    assert not departs(wanted, {**wanted, **added})
