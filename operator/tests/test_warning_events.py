"""Events are read only when needed, at most once per interval, and are optional."""

import asyncio
import json

import pytest

from rljob.kube.errors import ForbiddenError
from rljob.operator.planning.stalled import ASK_SECONDS
from rljob.operator.warning_events import EXPIRY_SECONDS, WarningEvents, normalize

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
TEXT = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'
MESSAGE = 'volume keys cannot be mounted: secret "keys" not found'


def event(uid, reason="FailedMount", message=TEXT, at="2025-12-31T23:59:50Z", kind="Pod"):
    """Return an event about the object ``uid``."""
    involved = {"kind": kind, "uid": uid}
    return {"involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": at, "type": "Warning"}


class Client:
    """The API's lists of events: warnings and pulls, a page of two at a time."""

    def __init__(self, *warnings, pulls=()):
        self.answers = {"type=Warning": list(warnings), "reason=Pulling": list(pulls)}
        self.requests = []

    async def list(self, resource, namespace, *, fields, token):
        await asyncio.sleep(0)
        if self.answers["type=Warning"] is None:
            raise ForbiddenError(403, "Forbidden", "no rights")
        begin = int(token or 0)
        if not begin:
            self.requests.append((namespace, fields))
        found = self.answers[fields]
        more = str(begin + 2) if len(found) > begin + 2 else ""
        return json.dumps({"items": found[begin : begin + 2], "metadata": {"continue": more}}).encode()


WARNINGS, PULLS = ("ns", "type=Warning"), ("ns", "reason=Pulling")


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def warning_events(clock):
    return lambda client: WarningEvents(client, lambda: clock[0], lambda: NOW + clock[0] - 100.0)


async def test_events_are_read_only_for_stalled_objects(warning_events):
    client = Client(event("a"), event("b"))
    reader = warning_events(client)
    assert await reader.of("ns", {"a": 3.0}) == {}
    assert client.requests == []
    assert await reader.of("ns", {"a": 0.0, "c": -1.0, "b": 2.0}) == {"a": MESSAGE}


async def test_one_list_serves_all_jobs_of_a_namespace(warning_events, clock):
    client = Client(event("a"), event("b"))
    reader = warning_events(client)
    found = await asyncio.gather(*(reader.of("ns", {uid: -1.0}) for uid in "abab"))
    assert found == [{uid: MESSAGE} for uid in "abab"]
    assert client.requests == [WARNINGS, PULLS]
    clock[0] += ASK_SECONDS
    client.answers["type=Warning"] = []
    assert await reader.of("ns", {"a": -1.0}) == {}
    assert client.requests == [WARNINGS, PULLS, WARNINGS], "without warnings the Pulling events are not read"


async def test_warnings_of_unused_namespaces_are_dropped(warning_events, clock):
    reader = warning_events(Client(event("a")))
    await reader.of("ns", {"a": -1.0})
    clock[0] += EXPIRY_SECONDS + 1
    await reader.of("other", {"a": -1.0})
    assert set(reader._namespaces) == {"other"}


async def test_all_pages_are_read(warning_events):
    client = Client(*(event(f"u{i}") for i in range(7)))
    assert len(await warning_events(client).of("ns", {f"u{i}": -1.0 for i in range(7)})) == 7


async def test_without_the_right_to_read_events_there_are_no_warnings(warning_events):
    client = Client()
    client.answers["type=Warning"] = None
    assert await warning_events(client).of("ns", {"a": -1.0}) == {}


async def test_the_newest_relevant_warning_is_used(warning_events):
    client = Client(
        event("a", "FailedScheduling", "no room", at="2025-12-31T23:59:59Z"),
        event("a", message="new", at="2025-12-31T23:59:55Z"),
        event("a", message="old", at="2025-12-31T23:59:51Z"),
    )
    assert await warning_events(client).of("ns", {"a": -1.0}) == {"a": "new"}


async def test_a_mount_warning_is_outdated_after_a_pulling_event(warning_events):
    pulls = [event("a", "Pulling", at="2025-12-31T23:59:52Z"), event("b", "Pulling", at="2025-12-31T23:59:40Z")]
    assert await warning_events(Client(event("a"), event("b"), pulls=pulls)).of("ns", {"a": -1.0, "b": -1.0}) == {
        "b": MESSAGE
    }


async def test_a_warning_about_a_pod_expires_and_a_warning_about_a_job_does_not(warning_events):
    old = "2025-12-31T23:57:00Z"
    refused = event("job", "FailedCreate", "pods are forbidden", at=old, kind="Job")
    client = Client(event("pod", at=old), refused)
    assert await warning_events(client).of("ns", {"pod": -1.0, "job": -1.0}) == {"job": "pods are forbidden"}


async def test_a_claim_identified_by_name_has_its_newest_warning_unless_it_is_old(warning_events, clock):
    def warning(uid, message, at):
        made = event(uid, "ProvisioningFailed", message, at, "PersistentVolumeClaim")
        made["involvedObject"]["name"] = "mine"
        return made

    client = Client(
        warning("new", 'storageclass "nope" not found', "2025-12-31T23:59:50Z"),
        warning("gone", "another class", "2025-12-31T23:55:00Z"),
    )
    reader, key = warning_events(client), "PersistentVolumeClaim/mine"
    assert await reader.of("ns", {key: -1.0}) == {key: 'storageclass "nope" not found'}
    clock[0] += 700.0
    assert await reader.of("ns", {key: -1.0}) == {}
    assert await reader.of("ns", {"new": -1.0}) == {"new": 'storageclass "nope" not found'}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (TEXT, MESSAGE),
        (
            "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "
            f'"{"0a" * 32}": plugin type="bridge" failed',
            "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox: "
            'plugin type="bridge" failed',
        ),
    ],
)
def test_parts_that_differ_between_events_are_removed(message, text):
    assert normalize(message) == text
