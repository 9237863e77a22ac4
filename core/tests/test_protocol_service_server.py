"""The log of a service."""

from __future__ import annotations

import logging

import pytest

from rljob.protocol.service_server import start_logging


def test_control_characters_in_the_log_of_a_service_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    start_logging()
    try:
        raise ValueError("\x1b]0;of code\x07")
    except ValueError:
        logging.getLogger("reward").warning("a worker exited on sample %s", "\x1b[2J\u202e", exc_info=True)
    written = capsys.readouterr().err
    assert r"WARNING reward: a worker exited on sample \x1b[2J\u202e" in written
    assert r"ValueError: \x1b]0;of code\x07" in written
    assert all(character.isprintable() for character in written.replace("\n", ""))
