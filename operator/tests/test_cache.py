"""Caches: the newest version of an object wins, in any order of arrival."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rljob.operator.cache import Cache, child_reader, read_job, read_pod
from rljob.operator.object_kinds import BY_KEY, PODS, RLJOBS

KEY = ("research", "sums")


def pods():
    return Cache(PODS, read_pod)


def raw(version, name="p", uid="u1", job="sums", **body):
    labels = {"rljob.dev/job": job} if job else {}
    meta = {"name": name, "namespace": "research", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return msgspec.Raw(msgspec.json.encode({"metadata": meta, **body}))


def versions(cache):
    return {name: int(pod.metadata.resource_version) for name, pod in cache.of_job(KEY).items()}


def test_an_older_event_does_not_replace_an_own_write():
    cache = pods()
    assert cache.put(raw(9)) == (KEY,)
    assert cache.put(raw(8)) == ()
    assert cache.put(raw(9)) == (), "the event of our own write is no news"
    assert cache.put(raw(10)) == (KEY,)
    assert versions(cache) == {"p": 10}


def test_an_event_from_before_an_own_deletion_is_ignored():
    cache = pods()
    cache.put(raw(3))
    cache.deleted("research", "p", "u1")
    assert cache.put(raw(4)) == () and versions(cache) == {}
    assert cache.put(raw(6, uid="u2")) == (KEY,), "a new object of the name is another"
    assert cache.drop(raw(5)) == (), "the deletion was of the old one"
    assert versions(cache) == {"p": 6}


def test_an_answer_from_before_the_deletion_by_others_is_ignored():
    cache = pods()
    cache.put(raw(3))
    assert cache.drop(raw(5)) == (KEY,)
    assert cache.put(raw(4)) == () and versions(cache) == {}
    assert cache.drop(raw(8, "never-seen", uid="u3")) == ()
    assert cache.put(raw(7, "never-seen", uid="u3")) == () and versions(cache) == {}


def test_an_answer_from_before_a_list_without_the_object_is_ignored():
    cache = pods()
    cache.put(raw(3))
    assert cache.replace("", [], 10) == {KEY}
    assert cache.put(raw(4)) == () and versions(cache) == {}


def test_an_object_that_has_its_labels_again_is_back():
    cache = pods()
    cache.put(raw(3))
    assert cache.drop(raw(4)) == (KEY,), "a watch with a selector reports a lost label as a deletion"
    assert cache.put(raw(5)) == (KEY,) and versions(cache) == {"p": 5}


def test_a_list_removes_deleted_objects_but_not_newer_writes():
    cache = pods()
    cache.put(raw(3, "old"))
    cache.put(raw(12, "new"))
    cache.put(raw(4, "kept"))
    changed = cache.replace("", [read_pod(raw(5, "kept")), read_pod(raw(6, "found", job="other"))], 10)
    assert changed == {KEY, ("research", "other")}
    assert versions(cache) == {"new": 12, "kept": 5}
    assert len(cache) == 3


def test_a_list_of_one_namespace_does_not_change_others():
    cache = pods()
    cache.put(raw(3))
    assert cache.replace("elsewhere", [], 10) == set()
    assert cache.replace("research", [], 10) == {KEY}


def test_an_object_that_loses_its_label_is_removed_from_the_job():
    cache = pods()
    cache.put(raw(3))
    cache.put(raw(4, job=""))
    assert versions(cache) == {} and len(cache) == 0


def test_an_object_that_moves_to_another_job_changes_both_jobs():
    cache = pods()
    cache.put(raw(3))
    assert cache.put(raw(4, job="other")) == (("research", "other"), KEY)
    assert versions(cache) == {}
    assert cache.put(raw(5, job="")) == (("research", "other"),), "an object without a job changes its last job"


def test_a_job_is_found_by_name_and_its_spec_and_status_are_not_decoded():
    cache = Cache(RLJOBS, read_job)
    assert cache.put(raw(3, "sums", job="", spec={"a": 1}, status={"b": 2})) == (KEY,)
    job = cache.find(*KEY)
    assert bytes(job.spec) == b'{"a":1}' and bytes(job.status) == b'{"b":2}'


def test_managed_fields_are_not_kept():
    body = raw(3, "d", spec={"replicas": 2})
    data = msgspec.json.decode(body)
    data["metadata"]["managedFields"] = [{"manager": "x"}]
    child = child_reader("Deployment")(msgspec.json.encode(data))
    assert child.kind == "Deployment" and "managedFields" not in child.body["metadata"]
    assert Cache(BY_KEY["Deployment"], child_reader("Deployment")).take(child) == (KEY,)


@given(st.permutations([("put", 1), ("put", 2), ("put", 5), ("put", 9)]))
def test_in_any_order_the_newest_stays(steps):
    cache = pods()
    for _, version in steps:
        cache.put(raw(version))
    assert versions(cache) == {"p": 9}


@given(st.data())
def test_answers_that_arrive_late_do_not_change_the_last_state(data):
    history = []
    for uid in range(data.draw(st.integers(1, 3), label="lives of the object")):
        history += [("put", str(uid))] * data.draw(st.integers(1, 3)) + [("drop", str(uid))]
    if data.draw(st.booleans(), label="exists at the end"):
        history.append(("put", "last"))
    answers = data.draw(st.lists(st.integers(0, len(history) - 1)), label="versions that answers show")
    arrivals = [(data.draw(st.integers(at, len(history))), at) for at in answers]
    cache = pods()
    for now, (event, uid) in enumerate([*history, ("end", "")]):
        for _, at in sorted(each for each in arrivals if each[0] == now):
            if history[at][0] == "put":
                cache.put(raw(at + 1, uid=history[at][1]))
        if event == "put":
            cache.put(raw(now + 1, uid=uid))
        elif event == "drop":
            cache.drop(raw(now + 1, uid=uid))
    assert versions(cache) == ({"p": len(history)} if history[-1][0] == "put" else {})


def test_times_that_are_not_known_are_null():
    """So Kubernetes reports a container that ended while its node was away."""
    ended = {"name": "main", "state": {"terminated": {"exitCode": 137, "startedAt": None, "finishedAt": None}}}
    scheduled = {"type": "PodScheduled", "status": "False", "lastTransitionTime": None}
    cache = pods()
    cache.put(raw(1, status={"phase": "Failed", "containerStatuses": [ended], "conditions": [scheduled]}))
    (pod,) = cache.of_job(KEY).values()
    assert pod.status.container_statuses[0].state.terminated.exit_code == 137
    assert pod.status.conditions[0].last_transition_time is None
