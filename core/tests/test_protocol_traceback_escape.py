"""Tracebacks of exceptions that nothing catches."""

from __future__ import annotations

import sys
import threading

import pytest

from rljob.protocol.traceback_escape import escape_tracebacks

HOSTILE = "\x1b]0;title\x07\x9b2J\u202e"
ESCAPED = r"\x1b]0;title\x07\x9b2J\u202e"


@pytest.fixture(autouse=True)
def hooks() -> None:
    escape_tracebacks()


def fail() -> None:
    raise RuntimeError(HOSTILE)


def assert_escaped(printed: str, first: str) -> None:
    assert printed.startswith(f"{first}\n") and printed.endswith(f"RuntimeError: {ESCAPED}\n")
    assert "in fail\n" in printed
    assert all(character.isprintable() for character in printed.replace("\n", ""))


def test_the_traceback_of_the_process_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        fail()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert_escaped(capsys.readouterr().err, "Traceback (most recent call last):")


def test_the_traceback_of_a_thread_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for target in (fail, sys.exit):
        thread = threading.Thread(target=target, name="of\x1b[2Ja user")
        thread.start()
        thread.join()
    assert_escaped(capsys.readouterr().err, r"Exception in thread of\x1b[2Ja user:")


def test_the_traceback_of_an_ignored_exception_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    class Environment:
        def __del__(self) -> None:
            fail()

    Environment()
    assert_escaped(capsys.readouterr().err, f"Exception ignored in {Environment.__del__.__qualname__}:")
