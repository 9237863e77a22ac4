"""Lists of RLJobs: what an interrupted watch of kopf missed, and types that are installed later."""

import asyncio
import json

import pytest

from rljob.kube.errors import ForbiddenError, NotFoundError, UnavailableError
from rljob.operator import informers
from rljob.operator.cache import Cache, child_reader, read_job
from rljob.operator.informers import JobLister, Reflector, TypesInstalledError
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import BY_KEY, NATIVE_POD_GROUPS, RLJOBS


def rljob(name, version, namespace="team"):
    meta = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"suspend": True}}


class Lists:
    """Answers to lists, one page each; an exception is raised."""

    def __init__(self, *answers):
        self.answers, self.queries = list(answers), []

    async def list(self, resource, namespace="", *, selector="", token="", limit=500):
        self.queries.append((resource.plural, namespace, token))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


def page(version, *items, token=""):
    return {"metadata": {"resourceVersion": str(version), "continue": token}, "items": list(items)}


@pytest.fixture
def slept(monkeypatch):
    """Seconds of each sleep. Sleeps end at once; the one after a complete list ends the test's loop."""
    found = []
    sleep = asyncio.sleep

    async def no_sleep(seconds):
        found.append(seconds)
        if seconds == informers.RESYNC_SECONDS and found.count(seconds) == 2:
            raise asyncio.CancelledError
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    return found


async def test_a_deletion_that_no_event_reported_is_found_by_the_next_list(slept):
    cache, changed = Cache(RLJOBS, read_job), []
    first = page(10, rljob("a", 3), token="next"), page(10, rljob("b", 4))
    client = Lists(*first, UnavailableError(0, "", "no answer"), page(20, rljob("a", 3)))
    lister = JobLister(client, cache, ["team"], changed.append)
    with pytest.raises(asyncio.CancelledError):
        await lister.run()
    await lister.synced()
    assert client.queries == [("rljobs", "team", ""), ("rljobs", "team", "next"), *[("rljobs", "team", "")] * 2]
    assert set(changed[:2]) == {("team", "a"), ("team", "b")} and changed[2:] == [("team", "b")]
    assert cache.find("team", "a") is not None and cache.find("team", "b") is None


async def test_a_type_that_is_installed_later_ends_the_operator_because_kopf_looks_for_types_once(slept):
    missing = NotFoundError(404, "NotFound", "the server could not find the requested resource")
    late = JobLister(
        Lists(UnavailableError(0, "", "no"), missing, missing, page(1)), Cache(RLJOBS, read_job), [], print
    )
    with pytest.raises(TypesInstalledError, match="was installed after the start"):
        await late.wait_for_type()
    known = JobLister(Lists(UnavailableError(0, "", "no"), page(1)), Cache(RLJOBS, read_job), [], print)
    await known.wait_for_type()


async def test_a_type_of_another_project_may_be_missing_and_is_watched_once_it_is_there(slept):
    missing = NotFoundError(404, "NotFound", "the server could not find the requested resource")
    client = Lists(missing, ForbiddenError(403, "Forbidden", "no right"), page(7), page(7))
    watched = []

    def watch(resource, namespace, *, selector, version, seconds):
        watched.append((resource.plural, version))
        raise asyncio.CancelledError

    client.watch = watch
    cache = Cache(BY_KEY["ScaledObject"], child_reader("ScaledObject"))
    reflector = Reflector(client, cache, "rljob.dev/job", "", print, Metrics())
    with pytest.raises(asyncio.CancelledError):
        await reflector.run()
    assert slept == [informers.TYPE_SECONDS] * 2 and reflector.synced.is_set()
    assert watched == [("scaledobjects", "7")]


async def test_the_first_version_of_a_type_that_the_cluster_serves_is_watched_again_after_an_upgrade(slept):
    missing = NotFoundError(404, "NotFound", "the server could not find the requested resource")
    client = Lists(missing, page(7), page(7), page(9), page(9))
    watched = []

    async def watch(resource, namespace, *, selector, version, seconds):
        watched.append((resource.version, version))
        if len(watched) == 2:
            raise asyncio.CancelledError
        raise missing
        yield b""

    client.watch = watch
    cache = Cache(NATIVE_POD_GROUPS, child_reader(NATIVE_POD_GROUPS.key))
    with pytest.raises(asyncio.CancelledError):
        await Reflector(client, cache, "rljob.dev/job", "", print, Metrics()).run()
    assert NATIVE_POD_GROUPS.versions == ("v1beta1", "v1alpha2")
    assert watched == [("v1alpha2", "7"), ("v1beta1", "9")], "1.36 serves v1alpha2, 1.37 v1beta1"
