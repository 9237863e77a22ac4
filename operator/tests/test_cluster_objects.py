"""Objects without a namespace that jobs in Kueue refer to: read by name, kept for a while, possibly missing."""

import json

import pytest

from rljob.kube.errors import ForbiddenError, NotFoundError, UnavailableError
from rljob.manifests.inputs import Flavor
from rljob.operator.cluster_objects import KEEP_SECONDS, ClusterObjects

TOLERATION = {"key": "h100", "operator": "Exists"}


class Server:
    """Answers to reads by path; an exception is raised."""

    def __init__(self, **answers):
        self.answers, self.reads = answers, []

    async def get(self, resource, namespace, name):
        self.reads.append(resource.path(namespace, name))
        answer = self.answers[name.replace("-", "_")]
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


async def test_flavors_are_read_by_name_and_kept_for_a_minute():
    server = Server(h100={"spec": {"nodeLabels": {"pool": "h100"}, "tolerations": [TOLERATION]}}, plain={"spec": {}})
    now = [0.0]
    found = ClusterObjects(server, lambda: now[0])
    expected = {"h100": Flavor({"pool": "h100"}, (TOLERATION,)), "plain": Flavor()}
    assert await found.flavors(["plain", "h100"]) == expected
    assert await found.flavors(["h100"]) == {"h100": expected["h100"]}
    paths = [f"/apis/kueue.x-k8s.io/v1beta2/resourceflavors/{name}" for name in ("h100", "plain")]
    assert server.reads == paths
    now[0] = KEEP_SECONDS
    await found.flavors(["h100"])
    assert server.reads == [*paths, paths[0]]


async def test_a_flavor_without_rights_or_without_kueue_is_missing():
    server = Server(a=ForbiddenError(403, "Forbidden", "no right"), b=NotFoundError(404, "NotFound", "no type"))
    assert await ClusterObjects(server, lambda: 0.0).flavors(["a", "b"]) == {}


async def test_the_value_of_a_priority_class_is_read_only_for_jobs_that_name_one():
    server = Server(high={"value": 1000}, gone=NotFoundError(404, "NotFound", "none"))
    found = ClusterObjects(server, lambda: 0.0)
    assert await found.priority(None) is None and server.reads == []
    assert await found.priority("high") == 1000 and await found.priority("gone") is None
    assert server.reads[0] == "/apis/scheduling.k8s.io/v1/priorityclasses/high"


async def test_an_answer_that_did_not_come_is_no_answer():
    """The job would wait at priority 0, and a running one would look as if its flavor was deleted."""
    server = Server(high=UnavailableError(0, "", "no answer"))
    found = ClusterObjects(server, lambda: 0.0)
    with pytest.raises(UnavailableError):
        await found.priority("high")
    server.answers["high"] = {"value": 1000}
    assert await found.priority("high") == 1000
