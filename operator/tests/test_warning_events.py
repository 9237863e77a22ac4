"""Events are asked for when they are needed, seldom, and done without where they cannot be had."""

import asyncio
import json

import pytest

from rljob.kube.errors import ForbiddenError
from rljob.operator.planning.stalled import ASK_SECONDS
from rljob.operator.warning_events import FORGOTTEN_SECONDS, WarningEvents, normalize

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
TEXT = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'
SAID = 'volume keys cannot be mounted: secret "keys" not found'


def event(uid, reason="FailedMount", message=TEXT, at="2025-12-31T23:59:50Z", kind="Pod"):
    """Return an event about the object ``uid``."""
    involved = {"kind": kind, "uid": uid}
    return {"involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": at, "type": "Warning"}


class Client:
    """The API's lists of events: warnings and pulls, a page of two at a time."""

    def __init__(self, *warnings, pulls=()):
        self.answers = {"type=Warning": list(warnings), "reason=Pulling": list(pulls)}
        self.asked = []

    async def list(self, resource, namespace, *, fields, token):
        await asyncio.sleep(0)
        if self.answers["type=Warning"] is None:
            raise ForbiddenError(403, "Forbidden", "no rights")
        begin = int(token or 0)
        if not begin:
            self.asked.append((namespace, fields))
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


async def test_what_is_late_is_asked_about_and_nothing_else(warning_events):
    client = Client(event("a"), event("b"))
    asked = warning_events(client)
    assert await asked.of("ns", {"a": 3.0}) == {}
    assert client.asked == []
    assert await asked.of("ns", {"a": 0.0, "c": -1.0, "b": 2.0}) == {"a": SAID}


async def test_one_answer_serves_all_jobs_of_a_namespace_for_a_while(warning_events, clock):
    client = Client(event("a"), event("b"))
    asked = warning_events(client)
    found = await asyncio.gather(*(asked.of("ns", {uid: -1.0}) for uid in "abab"))
    assert found == [{uid: SAID} for uid in "abab"]
    assert client.asked == [WARNINGS, PULLS]
    clock[0] += ASK_SECONDS
    client.answers["type=Warning"] = []
    assert await asked.of("ns", {"a": -1.0}) == {}
    assert client.asked == [WARNINGS, PULLS, WARNINGS], "where there is no warning nothing more is asked"


async def test_what_nobody_asks_about_any_more_is_forgotten(warning_events, clock):
    asked = warning_events(Client(event("a")))
    await asked.of("ns", {"a": -1.0})
    clock[0] += FORGOTTEN_SECONDS + 1
    await asked.of("other", {"a": -1.0})
    assert set(asked._namespaces) == {"other"}


async def test_all_pages_are_read(warning_events):
    client = Client(*(event(f"u{i}") for i in range(7)))
    assert len(await warning_events(client).of("ns", {f"u{i}": -1.0 for i in range(7)})) == 7


async def test_without_the_right_to_read_events_the_operator_works_on(warning_events):
    client = Client()
    client.answers["type=Warning"] = None
    assert await warning_events(client).of("ns", {"a": -1.0}) == {}


async def test_the_newest_warning_that_keeps_it_counts(warning_events):
    client = Client(
        event("a", "FailedScheduling", "no room", at="2025-12-31T23:59:59Z"),
        event("a", message="new", at="2025-12-31T23:59:55Z"),
        event("a", message="old", at="2025-12-31T23:59:51Z"),
    )
    assert await warning_events(client).of("ns", {"a": -1.0}) == {"a": "new"}


async def test_a_mount_that_failed_once_is_not_told_of_while_the_image_is_pulled(warning_events):
    pulls = [event("a", "Pulling", at="2025-12-31T23:59:52Z"), event("b", "Pulling", at="2025-12-31T23:59:40Z")]
    assert await warning_events(Client(event("a"), event("b"), pulls=pulls)).of("ns", {"a": -1.0, "b": -1.0}) == {
        "b": SAID
    }


async def test_a_warning_of_a_pod_that_is_not_repeated_is_over_and_one_of_a_job_is_not(warning_events):
    old = "2025-12-31T23:57:00Z"
    refused = event("job", "FailedCreate", "pods are forbidden", at=old, kind="Job")
    client = Client(event("pod", at=old), refused)
    assert await warning_events(client).of("ns", {"pod": -1.0, "job": -1.0}) == {"job": "pods are forbidden"}


async def test_a_claim_that_is_known_by_its_name_alone_has_its_newest_warning_unless_that_is_old(warning_events, clock):
    def warning(uid, message, at):
        made = event(uid, "ProvisioningFailed", message, at, "PersistentVolumeClaim")
        made["involvedObject"]["name"] = "mine"
        return made

    client = Client(
        warning("new", 'storageclass "nope" not found', "2025-12-31T23:59:50Z"),
        warning("gone", "another class", "2025-12-31T23:55:00Z"),
    )
    asked, key = warning_events(client), "PersistentVolumeClaim/mine"
    assert await asked.of("ns", {key: -1.0}) == {key: 'storageclass "nope" not found'}
    clock[0] += 700.0
    assert await asked.of("ns", {key: -1.0}) == {}
    assert await asked.of("ns", {"new": -1.0}) == {"new": 'storageclass "nope" not found'}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (TEXT, SAID),
        (
            "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "
            f'"{"0a" * 32}": plugin type="bridge" failed',
            "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox: "
            'plugin type="bridge" failed',
        ),
    ],
)
def test_what_is_another_in_each_event_is_left_out(message, text):
    assert normalize(message) == text
