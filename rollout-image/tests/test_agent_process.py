"""Exit codes and messages of an agent's process."""

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


@pytest.mark.parametrize(("error", "code", "reason"), ENDS)
def test_a_failed_agent_logs_the_reason_and_its_exit_code_tells_whether_a_restart_helps(
    error, code, reason, monkeypatch, caplog
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
    assert reason in caplog.text
