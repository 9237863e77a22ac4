"""How an agent's process ends."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob.protocol.coordinator_link import RefusedError
from rljob.rollout import agent_process
from rljob.rollout import main as entry
from rljob.rollout.supervisor import EngineStartError

ENDS = [
    (EngineStartError("the engine server exited with code 1: no such thing", "its last line"), 2, "no such thing"),
    (RefusedError("the manifest has no such pool"), 2, "the manifest has no such pool"),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS)
def test_an_agent_that_gives_up_says_why_and_ends_with_the_code_that_says_whether_a_restart_helps(
    error, code, words, monkeypatch, caplog
):
    async def run():
        raise ExceptionGroup("of the agent's tasks", [error])

    monkeypatch.setattr(agent_process, "build", lambda environment: SimpleNamespace(run=run))
    given = SimpleNamespace(name="main", storage=Path())
    monkeypatch.setattr("rljob.protocol.environment.read_environment", lambda: given)
    monkeypatch.setattr("sys.argv", ["rljob-agent"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == code
    assert words in caplog.text
