"""Programs are built once per content; a missing or old Go is fetched, or the error names the version to install."""

from __future__ import annotations

import functools
import http.server
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools.cluster import build, toolchain

GO_MOD = "module rljob.dev/tool\n\ngo 1.26.0\n\nrequire (\n\texample.org/tool v1.2.3\n)\n"


def fake_go(directory: Path, version: str = "go1.26.8", build_: str = "") -> Path:
    """Write a fake ``go`` that prints its version, "builds" by writing its arguments, and counts builds."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "go"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = env ]; then echo {version}; exit; fi\n'
        f'{build_ or ":"}\necho build >>"{directory}/builds"\n'
        'for last; do [ "$previous" = -o ] && out="$last"; previous="$last"; done\n'
        'mkdir -p "$(dirname "$out")" && echo "$@" >"$out"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module to build, ``tool``, in a temporary directory with its own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(build, "HERE", tmp_path)
    program = build.Program("tool", ".", {"main.v": ("example.org/tool", "{version}-{minor}")}, ("one", "two"))
    monkeypatch.setattr(build, "PROGRAMS", {"tool": program})
    directory = tmp_path / "tool"
    directory.mkdir()
    (directory / "go.mod").write_text(GO_MOD)
    (directory / "go.sum").write_text("")
    (directory / "main.go").write_text("package main")
    yield directory


def builds(tmp_path: Path) -> int:
    return len((tmp_path / "bin" / "builds").read_text().splitlines())


def test_a_program_is_built_once_and_has_all_its_names(tmp_path: Path, module: Path):
    fake_go(tmp_path / "bin")
    home = build.ensure("tool")
    assert build.ensure("tool") == home
    assert builds(tmp_path) == 1
    assert {path.name for path in home.iterdir()} == {"tool", "one", "two"}
    assert "-X main.v=1.2.3-2" in (home / "two").read_text()


def test_concurrent_builders_build_once(tmp_path: Path, module: Path):
    fake_go(tmp_path / "bin", build_="sleep 0.05")
    with ThreadPoolExecutor(4) as pool:
        homes = list(pool.map(build.ensure, ["tool"] * 4))
    assert len(set(homes)) == 1
    assert builds(tmp_path) == 1


@pytest.mark.parametrize("name", ["go.mod", "go.sum", "main.go"])
def test_a_changed_source_makes_another_program(tmp_path: Path, module: Path, name: str):
    fake_go(tmp_path / "bin")
    before = build.ensure("tool")
    with (module / name).open("a") as file:
        file.write("\n// changed\n")
    assert build.ensure("tool") != before
    assert before.exists()


def test_a_failed_build_reports_the_cause_and_leaves_no_file(tmp_path: Path, module: Path):
    fake_go(tmp_path / "bin", build_="echo no such package >&2; exit 1")
    with pytest.raises(build.BuildError, match="no such package"):
        build.ensure("tool")
    assert [path.name for path in build.cache_directory().iterdir()] == ["tool.lock"]


def test_every_program_has_a_module_that_names_its_version():
    for program in build.PROGRAMS.values():
        assert program.flags()[0] == "-trimpath"


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module proxy with a Go toolchain for this machine, whose checksum is known."""
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    name = f"golang.org/toolchain@v0.0.1-{toolchain.VERSION}.linux-amd64"
    text = fake_go(tmp_path / "served").read_text()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr(f"{name}/bin/go", text)
    path = tmp_path / "served" / f"{name.replace('@', '/@v/')}.zip"
    path.parent.mkdir(parents=True)
    path.write_bytes(archive.getvalue())
    with zipfile.ZipFile(archive) as members:
        monkeypatch.setattr(toolchain, "SUMS", {"x86_64": ("linux-amd64", toolchain.module_sum(members))})
    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("GOPROXY", f"http://127.0.0.1:{server.server_port},direct")
        yield
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_missing_go_is_fetched_into_the_cache(tmp_path: Path, module: Path, proxy: object):
    home = build.ensure("tool")
    assert (home / "tool").exists()
    assert os.access(build.cache_directory() / f"{toolchain.VERSION}.linux-amd64" / "bin" / "go", os.X_OK)


@pytest.mark.parametrize("version", ["go1.19.8", "go1.9.2", "devel"])
def test_a_go_that_is_too_old_is_not_used(tmp_path: Path, module: Path, proxy: object, version: str):
    fake_go(tmp_path / "bin", version=version)
    build.ensure("tool")
    assert not (tmp_path / "bin" / "builds").exists()


def test_a_toolchain_with_a_wrong_checksum_is_rejected(
    tmp_path: Path, module: Path, proxy: object, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(toolchain, "SUMS", {"x86_64": ("linux-amd64", "h1:other")})
    with pytest.raises(toolchain.NoToolchainError, match=r"has the checksum .* instead of h1:other"):
        build.ensure("tool")


@pytest.mark.parametrize(
    ("version", "problem"), [(None, "there is no Go on the PATH"), ("go1.19.8", r"go is too old \(go1\.19\.8\)")]
)
def test_without_a_proxy_the_error_names_the_version_to_install(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
):
    if version:
        fake_go(tmp_path / "bin", version=version)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("GOPROXY", "http://127.0.0.1:9")
    with pytest.raises(toolchain.NoToolchainError, match=rf"{problem}.*install Go 1\.26\.8 or later"):
        build.ensure("tool")
