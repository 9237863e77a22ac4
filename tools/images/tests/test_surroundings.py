"""The environment of a build: engine, base image, certificates and mirrors of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools.images import base, engines, host
from tools.images.torch import no_cuda

OS_RELEASE = 'ID=debian\nVERSION_CODENAME="bookworm"\n'
DEB822 = """Types: deb
URIs: https://deb.nodesource.com/node_20.x
Suites: nodistro
Components: main

Types: deb
# a comment
URIs: http://mirror.example.com/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@pytest.mark.parametrize(
    "sources",
    [
        DEB822,
        "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example.com/debian bookworm main contrib\n",
        "# deb http://old.example.com/debian bookworm main\ndeb http://mirror.example.com/debian bookworm main\n",
    ],
    ids=["deb822", "options", "comment"],
)
def test_the_base_image_uses_the_release_and_mirror_of_this_machine(tmp_path, sources):
    (tmp_path / "os-release").write_text(OS_RELEASE)
    (tmp_path / "x.sources").write_text(sources)
    found = base.release_here([tmp_path / "x.sources", tmp_path / "missing"], tmp_path / "os-release")
    assert found == base.Release("bookworm", "http://mirror.example.com/debian")


def test_without_a_mirror_the_error_asks_for_a_base(tmp_path):
    (tmp_path / "os-release").write_text(OS_RELEASE)
    with pytest.raises(base.NoBaseError, match="BASE="):
        base.release_here([], tmp_path / "os-release")


def test_the_mirror_is_not_part_of_the_key_of_the_base():
    assert base.Release("bookworm", "http://a").key == base.Release("bookworm", "http://b").key
    assert base.Release("bookworm", "http://a").key != base.Release("trixie", "http://a").key


def lend(tmp_path, environment, apt_sources=""):
    """Return the environment variables of a build step: a shell reads the written files."""
    host.lend(tmp_path, environment, apt_sources)
    text = (tmp_path / "environment").read_text().replace(host.INSIDE, str(tmp_path))
    (tmp_path / "environment").write_text(text)
    command = f". {tmp_path}/environment; env"
    output = subprocess.run(["env", "-i", "sh", "-c", command], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.splitlines())


def test_steps_get_the_certificates_the_index_and_the_proxy_and_nothing_else(tmp_path):
    certificates = tmp_path / "ca.pem"
    certificates.write_text("certificate")
    lent = tmp_path / "lent"
    lent.mkdir()
    environment = {
        "SSL_CERT_FILE": str(certificates),
        "UV_DEFAULT_INDEX": "https://a/?b=c d",
        "HTTPS_PROXY": "http://p",
    }
    found = lend(lent, environment | {"AWS_SECRET_ACCESS_KEY": "secret", "PIP_PASSWORD": "secret"})
    assert found["UV_DEFAULT_INDEX"] == "https://a/?b=c d"
    assert found["HTTPS_PROXY"] == "http://p"
    assert (lent / "certificates.pem").read_text() == "certificate"
    assert found["SSL_CERT_FILE"] == found["PIP_CERT"] == str(lent / "certificates.pem")
    assert "secret" not in "".join(found.values())


def test_the_cache_of_uv_is_used_where_an_engine_mounts_it(tmp_path):
    assert "UV_CACHE_DIR" not in lend(tmp_path, {})
    (tmp_path / host.CACHE / "CACHEDIR.TAG").write_text("")
    output = subprocess.run(
        ["sh", "-c", f". {tmp_path}/environment; echo $UV_CACHE_DIR"], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == str(tmp_path / host.CACHE)


def test_apt_sources_are_lent_only_for_a_base_that_is_built_here(tmp_path):
    lend(tmp_path, {})
    assert "sourcelist" not in (tmp_path / "apt.conf").read_text()
    (tmp_path / "other").mkdir()
    lend(tmp_path / "other", {}, "deb http://mirror bookworm main\n")
    assert "sourcelist" in (tmp_path / "other" / "apt.conf").read_text()
    assert "mirror" in (tmp_path / "other" / "sources.list").read_text()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that puts fake programs with given exit codes on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def have(**codes):
        for name, code in codes.items():
            (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
            (tmp_path / name).chmod(0o755)

    return have


def test_a_docker_client_without_an_engine_is_skipped(programs, tmp_path):
    programs(docker=1, buildah=0)
    assert engines.find(tmp_path).command[0] == "buildah"
    programs(podman=0)
    assert engines.find(tmp_path).command == ["podman"]
    programs(docker=0)
    assert isinstance(engines.find(tmp_path), engines.Docker)


def test_a_requested_engine_that_does_not_work_is_an_error(programs, tmp_path):
    programs(docker=1, buildah=0)
    with pytest.raises(engines.EngineError, match="docker does not work"):
        engines.find(tmp_path, "docker")


def test_without_root_the_error_names_the_program_to_install(programs, tmp_path, monkeypatch):
    programs()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(engines.EngineError, match="install buildah"):
        engines.find(tmp_path)


def test_a_failed_build_reports_its_exit_code_and_output(programs, tmp_path):
    (tmp_path / "buildah").write_text('#!/bin/sh\n[ "$1" = info ] || { echo no such package; exit 3; }\n')
    (tmp_path / "buildah").chmod(0o755)
    engine = engines.Buildah(["buildah"], tmp_path / "build.log")
    with pytest.raises(engines.EngineError, match=r"exit code 3:[\s\S]*no such package"):
        engine.build(engines.Build(tmp_path / "Dockerfile", tmp_path, "a"))


LIBRARY = "int cublasCreate_v2(void) { return 7; }\nint cublasVersion(void) { return 13; }\n"
USER = """
int cublasCreate_v2(void); int cublasVersion(void); int ncclInit(void);
int a = 1; int (*pointer)(void) = cublasVersion;
int call(void) { return cublasCreate_v2(); }
int other(void) { return ncclInit(); }
"""


def compiled(directory, name, source, *options):
    (directory / f"{name}.c").write_text(source)
    command = [
        "cc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{name}",
        "-o",
        directory / name,
        directory / f"{name}.c",
        *options,
    ]
    subprocess.run(command, check=True)
    return directory / name


CAPTURE = {"capture_output": True, "text": True}


def test_a_stub_has_the_required_symbols_and_aborts_with_a_message(tmp_path):
    real, wanting = tmp_path / "real", tmp_path / "wanting"
    real.mkdir()
    wanting.mkdir()
    (real / "map").write_text("libcublas.so.13 { global: *; };\n")
    cublas = compiled(real, "libcublas.so.13", LIBRARY, f"-Wl,--version-script={real}/map")
    nccl = compiled(real, "libnccl.so.2", "int ncclInit(void) { return 2; }\n")
    library = compiled(wanting, "libtorch.so", USER, cublas, nccl, f"-Wl,-rpath,{tmp_path}/stand-ins")
    found = no_cuda.stand_ins([library])
    assert found == {
        "libcublas.so.13": {"libcublas.so.13": {"cublasCreate_v2", "cublasVersion"}},
        "libnccl.so.2": {"": {"ncclInit"}},
    }
    (tmp_path / "stand-ins").mkdir()
    for name, functions in found.items():
        no_cuda.build(name, functions, tmp_path / "stand-ins")
    # In separate processes: in this one PyTorch may have loaded the real library.
    load = f"import ctypes; library = ctypes.CDLL({str(library)!r})"
    value = subprocess.run([sys.executable, "-c", f"{load}; print(ctypes.c_int.in_dll(library, 'a').value)"], **CAPTURE)
    assert value.stdout == "1\n", value.stderr
    done = subprocess.run([sys.executable, "-c", f"{load}; library.call()"], **CAPTURE)
    assert done.returncode < 0
    assert "cublasCreate_v2 was called: this image is made for machines without a GPU" in done.stderr
