"""The phases of `make test` and `make test-cluster`: which run, which failed, and which are skipped as unchanged."""

from __future__ import annotations

import contextlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import run_tests

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The make targets that ran; all pass. No cluster is started."""
    targets: list[str] = []

    def make(*asked: str) -> bool:
        targets.extend(asked)
        return True

    monkeypatch.setattr(run_tests, "_make", make)
    monkeypatch.setattr(run_tests, "chosen", contextlib.nullcontext)
    monkeypatch.setattr(run_tests.install, "from_layout", lambda cluster: None)
    return targets


@pytest.fixture
def tried(made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last argument of each pytest run; the first run fails."""
    asked: list[str] = []

    def run(*arguments: str, may_select_none: bool = False) -> bool:
        asked.append(arguments[-1])
        return len(asked) > 1

    monkeypatch.setattr(run_tests, "_pytest", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def images_that_exit_with(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(log: object) -> subprocess.Popen[str]:
        program = f"print('the cause'); raise SystemExit({code})"
        return subprocess.Popen([sys.executable, "-S", "-c", program], stdout=log, text=True)

    monkeypatch.setattr(run_tests, "_start_images", start)


def test_a_failed_phase_does_not_stop_the_next_and_is_named(tried, monkeypatch, capsys):
    images_that_exit_with(0, monkeypatch)
    assert run_tests.main(["cluster"]) == 1
    assert tried == ["e2e/integration", "e2e/pods", "tools/cluster"]
    *_, programs, server, images, pods, tools, _all = capsys.readouterr().out.splitlines()
    assert server.split() == ["API", "server", "0:00", "failed"]
    assert not [line for line in (programs, images, pods, tools) if "failed" in line]


def test_a_failed_check_ends_the_run(monkeypatch):
    monkeypatch.setattr(run_tests, "_make", lambda *targets: False)
    monkeypatch.setattr(run_tests, "_pytest", lambda *arguments: pytest.fail("it ran"))
    assert run_tests.main(["machine"]) == 1


def test_a_failed_build_is_shown_and_the_pods_are_not_tried(tried, monkeypatch, capsys):
    images_that_exit_with(3, monkeypatch)
    assert run_tests.main(["cluster"]) == 1
    assert "e2e/pods" not in tried
    assert "the cause\n" in capsys.readouterr().out


def test_a_cluster_that_does_not_start_fails_the_pods_and_the_run_continues(tried, monkeypatch, capsys):
    def chosen() -> None:
        raise run_tests.errors.MachineError("the cause")

    images_that_exit_with(0, monkeypatch)
    monkeypatch.setattr(run_tests, "chosen", chosen)
    assert run_tests.main(["cluster"]) == 1
    assert tried == ["e2e/integration", "tools/cluster"]
    assert "the cause\n" in (out := capsys.readouterr().out)
    assert [line.split()[2:] for line in out.splitlines() if line.startswith("pods")] == [["failed"]]


def test_tools_that_have_not_changed_since_their_tests_passed_are_skipped(tried, made, capsys):
    assert run_tests.main(["machine"]) == 1, "the first run fails"
    assert made == ["-j", "--output-sync", *run_tests.CHECKS]
    assert tried[1:] == ["tools/images", "tools/cluster"]
    assert run_tests.main(["machine"]) == 0
    assert len(tried) == 4
    assert "tools/cluster: unchanged" in capsys.readouterr().out


def test_tests_of_tools_that_failed_run_again(made, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = []
    monkeypatch.setattr(run_tests, "_pytest", lambda *arguments: tried.append(arguments[-1]))
    assert run_tests.main(["machine"]) == run_tests.main(["machine"]) == 1
    assert tried.count("tools/images") == 2


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("tools/images", "requirements/images/trainer.txt"),
        ("tools/images", "core/pyproject.toml"),
        ("tools/images", "operator/Dockerfile"),
        ("tools/images", ".dockerignore"),
        ("tools/cluster", "tools/images/layout.py"),
        ("tools/cluster", "crds/a.yaml"),
        ("tools/cluster", "charts/rljob/templates/a.yaml"),
    ],
)
def test_tests_of_tools_run_again_after_a_change_of_another_file_that_they_depend_on(
    folder, file, tried, tmp_path, monkeypatch
):
    tried.append("an earlier run")  # the first fails
    monkeypatch.setattr(run_tests, "ROOT", tmp_path / "repository")
    (changed := tmp_path / "repository" / file).parent.mkdir(parents=True)
    for content in ("1", "1", "2"):
        changed.write_text(content)
        run_tests._if_changed(run_tests.Phases(), "machine", folder)
    assert tried[1:] == [folder, folder]


def test_the_hash_of_files_follows_names_modes_and_contents(tmp_path):
    def content():
        return run_tests.content_hash(tmp_path, "**/*")

    (file := tmp_path / "a" / "b.py").parent.mkdir()
    file.write_text("1")
    seen = [content()]
    file.write_text("2")
    seen.append(content())
    file.chmod(0o755)
    seen.append(content())
    file.rename(tmp_path / "a" / "c.py")
    seen.append(content())
    assert len(set(seen)) == 4
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "b.pyc").write_text("3")
    assert content() == seen[-1]


@pytest.mark.parametrize("target", ["machine", "cluster"])
def test_arguments_are_passed_to_pytest(target, tried, monkeypatch):
    images_that_exit_with(0, monkeypatch)
    run_tests.main([target, "-k", "some"])
    assert tried == ["some"]


@pytest.mark.parametrize("target", ["machine", "cluster"])
@pytest.mark.parametrize(("arguments", "code"), [((), 1), (("-k", "none"), 0)])
def test_a_run_that_selects_no_test_passes_only_with_arguments(
    target, arguments, code, made, tmp_path, monkeypatch, capsys
):
    images_that_exit_with(0, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run_tests, "NOTHING_SELECTED", 3)
    monkeypatch.setattr(
        run_tests, "sys", SimpleNamespace(executable=str(program := tmp_path / "python"), stdout=sys.stdout)
    )
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert run_tests.main([target, *arguments]) == code
    tested = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("tests ", "API", "pods", "tools/"))
    ]
    assert [line.endswith("failed") for line in tested] == [bool(code)] * len(tested) != []


def test_pytest_without_a_selected_test_exits_with_the_code_for_that(tmp_path):
    (tmp_path / "test_some.py").write_text("def test_a(): pass\n")
    selected_none = (str(tmp_path), f"--rootdir={tmp_path}", "-p", "no:xdist", "-k", "none")
    assert run_tests._pytest(*selected_none, may_select_none=True)
    assert not run_tests._pytest(*selected_none)
    missing = (str(tmp_path / "missing.py"), f"--rootdir={tmp_path}", "-p", "no:xdist")
    assert not run_tests._pytest(*missing, may_select_none=True)


def test_the_files_that_start_first_exist():
    names = runpy.run_path(str(ROOT / "conftest.py"))["LONGEST_FIRST"]  # `import conftest` may find that of a folder
    assert not [name for name in names if not (ROOT / name).is_file()]
