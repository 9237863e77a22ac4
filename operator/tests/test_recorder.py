"""Contents of recorded events."""

import datetime

from rljob.operator.api_types import Meta
from rljob.operator.plan import Event
from rljob.operator.recorder import MESSAGE_CHARACTERS, event_body

JOB = Meta(name="sums", namespace="research", uid="u1", resource_version="7")
NOW = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)


def body(message="it runs", reason="Running"):
    return event_body(JOB, Event("Normal", reason, message), "operator-1", NOW)


def test_an_event_names_the_job_and_the_reporter():
    event = body()
    assert event["involvedObject"]["uid"] == "u1" and event["involvedObject"]["kind"] == "RLJob"
    assert event["reportingComponent"] == "rljob-operator" and event["reportingInstance"] == "operator-1"
    assert event["firstTimestamp"] == "2026-01-31T12:00:00Z"


def test_event_names_depend_only_on_the_content():
    assert body()["metadata"]["name"] == body()["metadata"]["name"]
    assert len({body()["metadata"]["name"], body("x")["metadata"]["name"], body(reason="X")["metadata"]["name"]}) == 3


def test_control_characters_of_a_message_are_escaped():
    assert body("it ended:\n\x1b[2Jdone\udc80")["message"] == "it ended:\n\\x1b[2Jdone\\udc80"


def test_a_long_message_is_truncated():
    assert len(body("x" * 5000)["message"]) == MESSAGE_CHARACTERS
