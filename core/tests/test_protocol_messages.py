"""Messages survive encoding, and frames outside the protocol are refused."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tests.message_examples import PROTOCOLS, STORED, UNIONS, example, text
from rljob.protocol import agent_protocol as m
from rljob.protocol.agent_protocol import Generate, RequestId, SamplingParams
from rljob.protocol.data import HELD_OUT_SHARE, is_held_out
from rljob.protocol.environment import ComponentEnvironment, read_environment
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.run_status import RunStatus, decode_status, encode_status
from rljob.protocol.score_messages import Score, ScoreItem, ScoreReply, ScoreRequest
from rljob.protocol.shared_messages import Message, Reject


@pytest.mark.parametrize("name", UNIONS)
def test_every_message_survives_encoding(name):
    sent = [example(kind) for kind in typing.get_args(UNIONS[name])]
    assert frame_decoder(UNIONS[name]).decode(encode_frame(sent)) == sent


def test_there_is_a_union_of_messages_for_each_direction_of_each_role():
    assert set(UNIONS) == {"FromAgent", "ToAgent", "FromTrainer", "ToTrainer", "FromRunner", "ToRunner"}
    for name, union in UNIONS.items():
        assert (Reject in typing.get_args(union)) == name.startswith("To")


def test_every_message_is_of_a_union():
    of_unions = {kind for union in UNIONS.values() for kind in typing.get_args(union)}
    names = [value for module in PROTOCOLS for value in vars(module).values()]
    defined = {kind for kind in names if isinstance(kind, type) and issubclass(kind, Message)}
    assert defined - of_unions == {Message}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([["Unknown", 1]]),
        msgspec.msgpack.encode([["Abort", "not a list", False]]),
        encode_frame([example(m.Completions)]),  # a message of the other direction
    ],
)
def test_a_frame_outside_the_protocol_is_refused(frame):
    with pytest.raises(msgspec.MsgspecError):
        frame_decoder(m.ToAgent).decode(frame)


def test_a_message_has_its_type_on_the_wire():
    """Frozen: processes of one run may be of two releases."""
    message = Generate(RequestId("g17.3", 0, 1), b"\x01\0\0\0", SamplingParams(1.0, 48, [2], 99))
    assert msgspec.msgpack.decode(encode_frame([message])) == [
        ["Generate", ["g17.3", 0, 1, ""], b"\x01\0\0\0", [1.0, 48, [2], 99, [], 0, 0], 0, ""]
    ]


def test_every_message_is_on_the_wire_as_in_the_stored_file():
    assert text() == STORED.read_text(), "python -m core.tests.message_examples --update updates the file"


def test_a_request_for_scores_survives_encoding():
    request = ScoreRequest(
        [ScoreItem("g1.0", "sums", "1+1\n", "2", "stop", {"question": "1+1", "metadata": {"a": [1]}})]
    )
    reply = ScoreReply([Score("g1.0", 1.0, {"format": 0.5}, "")])
    assert msgspec.json.decode(msgspec.json.encode(request), type=ScoreRequest) == request
    assert msgspec.json.decode(msgspec.json.encode(reply), type=ScoreReply) == reply


def test_a_status_of_a_newer_coordinator_is_read():
    newer = msgspec.json.encode({"state": "Running", "invented_later": {"a": 1}, "progress": {"step": 3, "more": 1}})
    assert decode_status(newer).progress.step == 3
    assert decode_status(encode_status(RunStatus("Starting"))) == RunStatus("Starting")
    for bad in (b"", b"{}", b'{"state": "Dancing"}'):
        with pytest.raises(ValueError):
            decode_status(bad)


def test_a_tenth_of_the_questions_is_held_out():
    held_out = [is_held_out(f"What is {i} + {i}?") for i in range(5000)]
    assert abs(sum(held_out) / 5000 - HELD_OUT_SHARE) < 0.02
    # Frozen: another rule would move training questions of a running job to its evaluation.
    assert [i for i in range(60) if held_out[i]] == [1, 8, 18, 40, 46, 48, 53]


@given(st.text(st.characters(codec="utf-8")))
def test_any_question_has_a_split(question):
    assert is_held_out(question) == is_held_out(question)


def test_a_missing_variable_is_an_error_with_its_name(monkeypatch):
    monkeypatch.delenv("RLJOB_JOB", raising=False)
    with pytest.raises(ValueError, match="RLJOB_JOB is not set; rljob run"):
        read_environment()


def test_a_path_is_in_the_storage_or_plain(tmp_path):
    here = ComponentEnvironment(None, tmp_path, "", "", "[::1]:80", "", "")
    assert here.path("job://a/b") == tmp_path / "a" / "b"
    assert str(here.path("/models/x")) == "/models/x"
    assert (here.listen_host, here.listen_port) == ("::1", 80)  # without brackets, as sockets expect
