"""The parts of the real cluster that can be seen without one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools.cluster.node import NotAllowedError, cgroups, context, existing, images, machine, network, oci
from tools.cluster.node.images import Images
from tools.cluster.node.install import names, values
from tools.cluster.node.machine import MachineError
from tools.cluster.node.system import CommandError, run
from tools.images.layout import Layout

ONE, TWO = "localhost/rljob-one:dev", "localhost/rljob-two:dev"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A layout of two images that have nothing in common."""
    made = Layout(tmp_path / "layout")
    for name in (ONE, TWO):
        program = tmp_path / name.split("-")[1].split(":")[0]
        program.write_text(name)
        oci.add_program(made, program, name, "amd64")
    return made


def tar(layout: Layout, wanted: list[str], without: set[str]) -> tarfile.TarFile:
    file = io.BytesIO()
    oci.write(layout, wanted, without, file)
    return tarfile.open(fileobj=io.BytesIO(file.getvalue()))


def read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None
    return member.read()


# --- images -----------------------------------------------------------------------------------------------------------


def test_an_archive_holds_what_is_missing_and_names_all_that_is_wanted(layout: Layout):
    held = oci.digests(layout, [ONE])
    archive = tar(layout, [ONE, TWO], set(held))
    index = json.loads(read(archive, "index.json"))
    assert [found["annotations"][oci.NAME] for found in index["manifests"]] == [ONE, TWO]
    blobs = {name.removeprefix("blobs/sha256/") for name in archive.getnames() if name.startswith("blobs/")}
    assert blobs == {digest.removeprefix("sha256:") for digest in oci.digests(layout, [TWO])}
    assert not blobs & {digest.removeprefix("sha256:") for digest in held}


def test_an_image_of_a_program_runs_it_as_nobody(layout: Layout):
    config = layout.config(ONE)
    assert config["config"] == {"Entrypoint": ["/one"], "User": "65535:65535"}
    (layer,) = layout.layers(ONE)
    with tarfile.open(layer) as archive:
        assert archive.getmember("one").mode == 0o755
        assert read(archive, "one") == ONE.encode()


class Ctr:
    """Plays ctr: what it was asked, and what it answers."""

    def __init__(self, tmp_path: Path, answers: dict[str, str], code: int = 0) -> None:
        self.log = tmp_path / "asked"
        self.log.touch()
        cases = "".join(f'"{asked}") printf "{answer}" ;;\n' for asked, answer in answers.items())
        self.program = tmp_path / "ctr"
        self.program.write_text(
            f'#!/bin/sh\nshift 3\necho "$@" >>{self.log}\ncase "$1 $2" in\n{cases}"images import") cat >/dev/null\n'
            f"echo no room >&2; exit {code} ;;\nesac\n"
        )
        self.program.chmod(0o755)
        self.images = Images([str(self.program)], tmp_path / "store")

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


def test_an_image_that_is_there_is_not_loaded_again_and_one_of_its_name_is(tmp_path: Path, layout: Layout):
    one = layout.references()[ONE]
    ctr = Ctr(tmp_path, {"images list": f"REF TYPE DIGEST\\n{ONE} x {one}\\n{TWO} x sha256:other\\n"})
    assert ctr.images.load(layout, [ONE, TWO]) == [TWO]
    assert ctr.images.load(layout, [ONE]) == []
    ingested = [line.split()[-1] for line in ctr.asked() if line.startswith("content ingest")]
    assert ingested == oci.digests(layout, [TWO])


def test_blobs_are_linked_into_the_store_where_that_is_possible(tmp_path: Path, layout: Layout):
    blobs = tmp_path / "store" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    known, *others = oci.digests(layout, [ONE])
    ctr = Ctr(tmp_path, {"content list": f"{known}\\n"})
    ctr.images.load(layout, [ONE])
    assert {path.name for path in blobs.iterdir()} == {digest.removeprefix("sha256:") for digest in others}
    assert all(path.samefile(layout.blob(f"sha256:{path.name}")) for path in blobs.iterdir())


def test_what_containerd_refuses_is_said(tmp_path: Path, layout: Layout):
    with pytest.raises(CommandError, match="images import - failed with code 1: no room"):
        Ctr(tmp_path, {}, code=1).images.load(layout, [ONE])


def test_an_image_that_the_layout_does_not_have_cannot_be_loaded(tmp_path: Path, layout: Layout):
    with pytest.raises(KeyError, match="rljob-three"):
        Ctr(tmp_path, {}).images.load(layout, ["localhost/rljob-three:dev"])


def test_images_that_are_there_no_more_are_removed_also_those_whose_name_another_has_now(tmp_path: Path):
    there = {
        ONE: "sha256:one",
        "sha256:configuration-of-one": "sha256:one",
        "sha256:configuration-of-one-before": "sha256:one-before",
        TWO: "sha256:two",
        "sha256:configuration-of-two": "sha256:two",
        "localhost/pause:rljob": "sha256:pause",
        "sha256:configuration-of-pause": "sha256:pause",
    }
    lines = "".join(f"{name} x {digest} x\\n" for name, digest in there.items())
    ctr = Ctr(tmp_path, {"images list": f"REF TYPE DIGEST\\n{lines}"})
    ctr.images.keep([ONE], "localhost/rljob-")
    gone = f"sha256:configuration-of-one-before {TWO} sha256:configuration-of-two"
    assert ctr.asked()[-1] == f"images remove {gone}"


# --- the machine ------------------------------------------------------------------------------------------------------


def test_addresses_of_the_link_are_none_that_the_machine_knows(monkeypatch: pytest.MonkeyPatch):
    routes = [{"dst": "default"}, {"dst": "172.16.0.0/12"}, {"dst": "192.168.255.254"}]
    monkeypatch.setattr(network, "run", lambda *_: json.dumps(routes))
    assert network.free("link") == network.Link("link", "10.255.255.253", "10.255.255.254", 30)
    routes.append({"dst": "10.0.0.0/8"})
    with pytest.raises(CommandError, match="free one of them"):
        network.free("link")


def test_cgroups_are_removed_from_below_in_every_hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mounts = tmp_path / "mounts"
    kinds = {"cpu": "cgroup", "unified": "cgroup2", "else": "tmpfs"}
    mounts.write_text("".join(f"x {tmp_path / name} {kind} rw 0 0\n" for name, kind in kinds.items()))
    found = cgroups.hierarchies(mounts)
    assert found == [tmp_path / "cpu", tmp_path / "unified"]
    monkeypatch.setattr(cgroups, "hierarchies", lambda: found)
    for hierarchy in found:
        hierarchy.mkdir()
    cgroups.make("tests")
    (tmp_path / "cpu" / "tests" / "pods" / "one").mkdir(parents=True)
    cgroups.remove("tests")
    assert [list(hierarchy.iterdir()) for hierarchy in found] == [[], []]


def test_with_version_2_alone_controllers_are_passed_on_to_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(Path, "write_text", lambda self, text: written.append((self.name, text)))
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path])
    cgroups.make("tests")
    assert written == [("cgroup.subtree_control", "+cpu"), ("cgroup.subtree_control", "+memory")]
    written.clear()
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path, tmp_path])
    cgroups.make("tests")
    assert written == [], "beside version 1, its controllers are that one's"


def test_who_is_not_root_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MachineError, match=r"needs root on Linux.*run it with sudo"):
        machine.prepare(tmp_path)


def test_packages_that_are_missing_are_named_where_they_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "PLUGIN_DIRECTORIES", (tmp_path,))
    with pytest.raises(MachineError, match=r"conntrack containerd containernetworking-plugins .* tini"):
        machine.prepare(tmp_path)


def test_images_are_not_unpacked_on_an_overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "missing", list)
    done = subprocess.CompletedProcess((), 0, "overlayfs\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(MachineError, match="set XDG_CACHE_HOME to a directory on a disk"):
        machine.prepare(tmp_path)


def test_a_command_that_fails_says_which_and_why():
    with pytest.raises(CommandError, match=r"ls /none failed with code 2: .*No such file"):
        run("ls", "/none")


# --- clusters that are there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "asked", "used"),
    [
        (None, None, None),
        (None, "kind-tests", "kind-tests"),
        ("staging", None, "staging"),
        ("staging", "staging", "staging"),
        ("staging", "kind-tests", "kind-tests"),
        ("", None, None),
    ],
)
def test_a_cluster_is_used_that_is_named_or_kinds(
    named: str | None, asked: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(existing.ALLOWED, raising=False)
    if named is not None:
        monkeypatch.setenv(existing.ALLOWED, named)
    assert context(asked) == used


@pytest.mark.parametrize("named", [None, "staging"])
def test_every_other_cluster_is_refused(named: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(existing.ALLOWED, raising=False)
    if named is not None:
        monkeypatch.setenv(existing.ALLOWED, named)
    with pytest.raises(NotAllowedError, match=r"production is not used.*set RLJOB_E2E_CONTEXT=production"):
        context("production")


def test_the_chart_is_told_the_images_and_which_operator_it_is():
    told = values(names("registry.example.com/rljob", "v1"), "sha256:1")
    assert told["images"]["operator"] == "registry.example.com/rljob/rljob-operator:v1"
    assert told["podAnnotations"] != values(names("registry.example.com/rljob", "v1"), "sha256:2")["podAnnotations"]
    assert images.CTR == ("ctr", "--namespace", "k8s.io")
