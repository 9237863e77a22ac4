"""What an agent's process is told, and how it ends when that cannot work."""

import pytest

from rljob.protocol.environment import read_environment
from rljob.rollout import wiring
from rljob.rollout.main import main
from rljob.rollout.supervisor import EngineStartError


@pytest.fixture
def environment(tmp_path, monkeypatch, manifest):
    def build(name="main"):
        (tmp_path / "job.json").write_text(manifest("job://model"))
        monkeypatch.setenv("RLJOB_JOB", str(tmp_path / "job.json"))
        monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
        monkeypatch.setenv("RLJOB_COORDINATOR", "http://127.0.0.1:9")
        monkeypatch.setenv("RLJOB_NAME", name)
        return read_environment()

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return build


def test_a_pool_that_is_not_in_the_manifest_is_refused(environment):
    with pytest.raises(ValueError, match="there is no pool called 'other'"):
        wiring.build(environment("other"))


def test_a_directory_without_a_model_is_refused(environment, tmp_path):
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ValueError, match="holds no Hugging Face model"):
        wiring.build(environment())


def test_an_engine_that_cannot_start_is_exit_code_2_with_its_last_lines(environment, monkeypatch, caplog):
    async def fail(adapter):
        raise EngineStartError("the engine server exited with code 1; its last lines:\nno such model")

    environment()
    monkeypatch.setattr(wiring.EngineProcess, "start", fail)
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    assert "no such model" in caplog.text
