"""Commands for rewards of a user: which job and reward they check or refuse. e2e/test_docs.py runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.cli import reward_commands
from rljob.cli.reward_commands import app, summary
from rljob.local.errors import CliError
from rljob.local.reward_check import PoolServer, check_pool, checked_job, pool_server
from rljob.protocol.score_messages import CheckedSample


def job(*rewards: dict, pools: dict[str, str] | None = None):
    """Return a job with these rewards, and frozen pools by name with the source of their model."""
    pools = pools or {}
    spec = {
        "models": [
            {"name": "policy", "source": "job://model"},
            *({"name": name, "source": source} for name, source in pools.items()),
        ],
        "training": {"steps": 1},
        "tasks": [{"name": "sums", "data": {"jsonl": {"path": "a"}}, "reward": rewards[0]["name"]}],
        "rewards": list(rewards),
        "rollouts": [{"name": "main"}, *({"name": name, "model": name} for name in pools)],
    }
    return validate({"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": spec})


EXACT = {"name": "exact", "builtin": "exact_match", "config": {"column": "label"}, "timeoutSeconds": 3}
FAR = {"name": "far", "url": "http://a"}


def test_the_only_reward_is_checked_as_the_run_used_it() -> None:
    found, name = checked_job(job(EXACT), None, None, [])
    assert name == "exact" and found.spec.rewards[0] == job(EXACT).spec.rewards[0]


def test_a_function_takes_the_place_of_the_scorer() -> None:
    found, name = checked_job(job(EXACT, FAR), "far", "mine:reward", [])
    assert name == "far" and found.spec.rewards[0].builtin == "exact_match"
    assert (found.spec.rewards[1].function, found.spec.rewards[1].url) == ("mine:reward", None)
    found, _ = checked_job(job(EXACT), None, "mine:reward", [])
    assert (found.spec.rewards[0].function, found.spec.rewards[0].config) == ("mine:reward", {})
    assert found.spec.rewards[0].timeout_seconds == 3


def test_options_may_be_changed() -> None:
    found, _ = checked_job(job(EXACT), None, None, ["spec.rewards[exact].config.column=other"])
    assert found.spec.rewards[0].config == {"column": "other"}
    with pytest.raises(ManifestError, match=r"config\.colum: unknown field"):
        checked_job(job(EXACT), None, None, ["spec.rewards[exact].config.colum=other"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (None, "the run has the rewards exact, far; name one with --reward"),
        ("near", "the run has no reward 'near'; there are exact, far"),
        ("far", "reward far is a program of its own; give its function with --function module:attribute"),
    ],
)
def test_a_reward_that_cannot_be_checked_is_refused(name: str | None, sentence: str) -> None:
    with pytest.raises(CliError) as refused:
        checked_job(job(EXACT, FAR), name, None, [])
    assert refused.value.sentence == sentence and refused.value.exit_code == 2


def judged_job():
    clear = {"name": "clear", "builtin": "judge", "config": {"pool": "judge"}}
    return job(clear, EXACT, pools={"judge": "hf://a/b"})


@pytest.mark.parametrize(
    ("given", "url"),
    [("judge=http://a:1/v1", "http://a:1"), ("judge=https://a/v1/", "https://a"), ("judge=http://a:1", "http://a:1")],
)
def test_a_server_stands_for_a_frozen_pool(given: str, url: str) -> None:
    assert pool_server(given, "large") == PoolServer("judge", url, "large")
    check_pool(judged_job(), "clear", pool_server(given))
    check_pool(judged_job(), "exact", None)


BAD = ["judge=http://[", "judge=http://:1", "judge=http://a:x", "judge=http://a:99999"]


@pytest.mark.parametrize("given", ["judge", "judge=", "=http://a", "judge=a:1", "http://a:1/v1", "judge=http://", *BAD])
def test_what_is_no_server_is_refused(given: str) -> None:
    with pytest.raises(CliError, match=re.escape(f"--pool {given} is not NAME=URL, such as judge=http://")):
        pool_server(given)


@pytest.mark.parametrize(
    ("found", "name", "server", "sentence"),
    [
        (judged_job, "clear", None, "reward clear asks the frozen pool judge, which runs only with its job; give the"),
        (judged_job, "clear", PoolServer("jury", "http://a"), "the run has no frozen pool 'jury'; there are judge"),
        (lambda: job(EXACT), "exact", PoolServer("jury", "http://a"), "the run has no frozen pool 'jury'; it has none"),
    ],
)
def test_a_pool_without_a_server_is_refused(found, name: str, server: PoolServer | None, sentence: str) -> None:
    with pytest.raises(CliError) as refused:
        check_pool(found(), name, server)
    assert refused.value.sentence.startswith(sentence) and refused.value.exit_code == 2


def test_the_summary_counts_errors_and_changes() -> None:
    found = [
        CheckedSample("a", "t", 1.0, 1.0, {}, "", 0.1),
        CheckedSample("b", "t", 1.0, 0.0, {}, "", 0.2),
        CheckedSample("c", "t", None, 0.5, {}, "", 0.6),
        CheckedSample("d", "t", 1.0, 0.0, {}, "wrong", 0.3),
    ]
    assert summary(found) == {
        "scored": 3,
        "errors": 1,
        "changed": 1,
        "mean_reward": 0.5,
        "seconds_median": 0.25,
        "seconds_max": 0.6,
    }
    assert summary([])["mean_reward"] is None


def test_a_new_reward_has_a_test_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new", "my_reward"]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "my_reward").iterdir()) == [
        "Dockerfile",
        "my_reward.py",
        "test_my_reward.py",
    ]
    assert "name: my-reward\n" in (tmp_path / "my_reward" / "Dockerfile").read_text()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "my_reward"], capture_output=True, text=True)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("My", "'My' is not the name of a module; use"),
        ("here", "here exists; give a name that"),
        ("class", "class is a keyword of Python; give another name"),
        *((name, f"{name} is a name of pytest's files; give") for name in ("conftest", "test_mine", "mine_test")),
        *((name, f"{name} is an installed Python module; give") for name in ("json", "pytest", "rljob")),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    refused = CliRunner().invoke(app, ["new", name]).exception
    assert isinstance(refused, CliError) and refused.sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reward"], "'reward' is not MODULE:FUNCTION, such as my_rewards:reward"),
        (["mine:", "--listen", "127.0.0.1:1"], "'mine:' is not MODULE:FUNCTION, such as my_rewards:reward"),
        *(
            (["mine:reward", "--listen", listen], f"--listen {listen} is not HOST:PORT with a port up to 65535, such")
            for listen in ("foo", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x", "[::1]")
        ),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], sentence: str) -> None:
    refused = CliRunner().invoke(app, ["serve", *arguments]).exception
    assert isinstance(refused, CliError) and refused.sentence.startswith(sentence)


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "3601"])
def test_a_time_limit_is_within_the_bounds_of_the_manifest(seconds: str) -> None:
    assert CliRunner().invoke(app, ["serve", "mine:reward", "--timeout", seconds]).exit_code == 2


@pytest.mark.parametrize("listen", ["127.0.0.1:0", ":8000", "[::1]:8000", "localhost:65535"])
def test_a_reward_is_served_at_an_address(monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    started = []
    monkeypatch.setattr(reward_commands, "become", lambda *words: started.append(words))
    assert CliRunner().invoke(app, ["serve", "mine:reward", "--listen", listen]).exit_code == 0
    assert started == [("rljob.rewards.main", "--serve", "mine:reward", listen, "1", "10.0")]
