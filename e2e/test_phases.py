"""The phases of `make test`: all are run, what failed is named, and the files that begin first are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import conftest
from e2e import phases

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pytest was asked for, the last word of each; the first phase fails."""
    asked: list[str] = []

    def run(*arguments: str, failed: set[str] | None = None) -> bool:
        asked.append(arguments[-1])
        return "--ignore=e2e/pods" not in arguments

    monkeypatch.setattr(phases, "_pytest", run)
    monkeypatch.setattr(phases, "_make", lambda targets: True)
    return asked


def builds_that_end_with(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(log: object) -> subprocess.Popen[str]:
        program = f"print('what was wrong'); raise SystemExit({code})"
        return subprocess.Popen([sys.executable, "-S", "-c", program], stdout=log, text=True)

    monkeypatch.setattr(phases, "_start_builds", start)


def test_tests_that_fail_keep_no_phase_from_running(tried, monkeypatch, capsys):
    builds_that_end_with(0, monkeypatch)
    assert phases.main([]) == 1
    assert tried == ["--ignore=e2e/pods", "e2e/integration", "e2e/pods"]
    *_, checks, beside, builds, server, pods, _all = capsys.readouterr().out.splitlines()
    assert beside.split() == ["two", "by", "two", "0:00", "failed"]
    assert not [line for line in (checks, builds, server, pods) if "failed" in line]


FIRST = {"a/test_b.py::test[0]", "a/test_b.py::test[1]", "a/test_c.py::test"}


def failing(monkeypatch: pytest.MonkeyPatch, first: set[str], again: set[str]) -> list[tuple[str, ...]]:
    """Have tests fail the first time, and others when they are run once more; return what is run after that."""
    later: list[tuple[str, ...]] = []

    def run(*arguments: str, failed: set[str] | None = None) -> bool:
        assert failed is not None
        if not arguments[-1].startswith("--ignore"):
            later.append(arguments)
            failed |= again if arguments[0].startswith("a/") else set()
        else:
            failed |= first
        return not failed

    monkeypatch.setattr(phases, "_pytest", run)
    monkeypatch.setattr(phases, "_make", lambda targets: True)
    builds_that_end_with(0, monkeypatch)
    return later


@pytest.mark.parametrize(
    ("again", "passes"),
    [(set(), True), ({"a/test_b.py::other"}, True), ({"a/test_b.py::test[1]", "a/test_b.py::other"}, False)],
)
def test_a_test_that_passes_in_one_of_two_runs_is_unsteady_and_named(again, passes, monkeypatch, capsys):
    later = failing(monkeypatch, FIRST, again)
    assert phases.main([]) == (0 if passes else 1)
    assert later[0] == ("a/test_b.py", "a/test_c.py") and len(later) == 3
    said = capsys.readouterr().out.splitlines()
    assert "once more: a/test_b.py a/test_c.py    0:00" + ("" if passes else "  failed") in said
    assert [line for line in said if "unsteady" in line] == [f"unsteady: {test}" for test in sorted(FIRST ^ again)]


def test_many_files_with_failed_tests_are_no_accident(monkeypatch):
    later = failing(monkeypatch, {f"a/test_{i}.py::test" for i in range(4)}, set())
    assert phases.main([]) == 1
    assert len(later) == 2


def test_what_failed_is_told(tmp_path, capfd):
    (tmp_path / "test_some.py").write_text("def test_a(): pass\n\ndef test_b(): assert False\n")
    failed = set()
    assert not phases._pytest(str(tmp_path), f"--rootdir={tmp_path}", "-p", "no:xdist", failed=failed)
    assert failed == {"test_some.py::test_b"}
    assert phases._pytest(str(tmp_path), f"--rootdir={tmp_path}", "-k", "test_a")


def test_a_run_that_was_cut_off_tells_of_no_test(tmp_path, capfd):
    (tmp_path / "test_some.py").write_text("def test_a(): assert False\n\ndef test_b(): raise KeyboardInterrupt\n")
    failed = set()
    assert not phases._pytest(str(tmp_path), f"--rootdir={tmp_path}", "-p", "no:xdist", failed=failed)
    assert failed == set(), "it must not pass for one in which all others passed"


def test_a_build_that_fails_is_shown_and_nothing_that_needs_it_is_run(tried, monkeypatch, capsys):
    builds_that_end_with(3, monkeypatch)
    assert phases.main([]) == 1
    assert tried == ["--ignore=e2e/pods"]
    assert "what was wrong\n" in capsys.readouterr().out


def test_arguments_are_pytest_s(tried, monkeypatch):
    builds_that_end_with(0, monkeypatch)
    assert phases.main(["-k", "some"]) == 0
    assert tried == ["some"]


def test_the_files_that_begin_first_are_there():
    assert not [name for name in conftest.LONGEST_FIRST if not (ROOT / name).is_file()]
