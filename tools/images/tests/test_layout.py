"""The OCI layout, and the export of images to it from an engine's storage or from an archive of Docker."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile

import pytest

from tools.images import docker_archive, storage
from tools.images.layout import BrokenLayoutError, Layout


def layer(**files):
    """Return the tar file of a layer with these files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def digest(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def config(*layers, **more):
    return json.dumps({"rootfs": {"diff_ids": [digest(content) for content in layers]}, "config": more}).encode()


BASE, CODE = layer(python=b"p" * 700, libc=b""), layer(main=b"print()")


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path / "oci")


def fill(layout, name, *layers, **more):
    for content in layers:
        layout.write_blob([content], digest(content))
    layout.add(name, config(*layers, **more))


def test_an_image_is_found_by_its_full_name(layout):
    fill(layout, "localhost/a:dev", BASE, CODE, User="65532")
    assert [path.read_bytes() for path in layout.layers("localhost/a:dev")] == [BASE, CODE]
    assert layout.config("localhost/a:dev")["config"] == {"User": "65532"}
    assert json.loads((layout.path / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    with pytest.raises(KeyError):
        layout.config("localhost/b:dev")


def test_a_name_can_be_given_to_another_image_and_unused_blobs_are_deleted(layout):
    fill(layout, "a", BASE, CODE)
    fill(layout, "b", BASE)
    fill(layout, "a", BASE)
    assert len(layout.layers("a")) == 1
    layout.keep(["a", "b"])
    assert layout.blob(digest(BASE)).exists()
    assert not layout.blob(digest(CODE)).exists()
    layout.keep(["b"])
    assert list(layout.references()) == ["b"]


def test_a_blob_with_a_wrong_digest_is_not_kept(layout):
    with pytest.raises(BrokenLayoutError):
        layout.write_blob([b"else"], digest(BASE))
    assert list((layout.path / "blobs" / "sha256").iterdir()) == []


def test_an_existing_blob_is_not_read_again(layout):
    fill(layout, "a", BASE)
    layout.write_blob((1 / 0 for _ in "x"), digest(BASE))


def split(content):
    """Return the tar-split entries of a tar file, and the files that they leave out."""
    lines, files, end = [], {}, 0
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            lines.append({"type": 2, "payload": base64.b64encode(content[end : member.offset_data]).decode()})
            lines.append({"type": 1, "name": member.name, **({"size": member.size} if member.size else {})})
            end = member.offset_data + member.size
            files[member.name] = content[member.offset_data : end]
    lines.append({"type": 2, "payload": base64.b64encode(content[end:]).decode()})
    return "".join(f"{json.dumps(line | {'position': i})}\n" for i, line in enumerate(lines)), files


@pytest.fixture
def root(tmp_path):
    """The storage of an engine with the image f00 of two layers."""
    known = []
    for name, content in {"one": BASE, "two": CODE}.items():
        lines, files = split(content)
        kept = tmp_path / "overlay-layers" / f"{name}.tar-split.gz"
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(gzip.compress(lines.encode()))
        for file, inside in files.items():
            path = tmp_path / "overlay" / name / "diff" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(inside)
        known.append({"id": name, "diff-digest": digest(content)})
    (tmp_path / "overlay-layers" / "layers.json").write_text(json.dumps([*known, {"id": "of a container"}]))
    images = tmp_path / "overlay-images" / "f00"
    images.mkdir(parents=True)
    (images / f"={base64.b64encode(b'sha256:f00').decode()}").write_bytes(config(BASE, CODE))
    return tmp_path


def test_an_image_from_the_storage_of_an_engine_is_exported_byte_for_byte(root, layout):
    storage.export(root, layout, "a", "f00")
    assert [path.read_bytes() for path in layout.layers("a")] == [BASE, CODE]


def test_a_layer_that_the_layout_has_is_not_read_from_the_storage(root, layout):
    fill(layout, "old", BASE)
    (root / "overlay" / "one" / "diff" / "python").unlink()
    storage.export(root, layout, "a", "f00")
    assert len(layout.layers("a")) == 2


def test_a_storage_whose_files_were_changed_gives_no_image(root, layout):
    (root / "overlay" / "two" / "diff" / "main").write_bytes(b"import os")
    with pytest.raises(BrokenLayoutError):
        storage.export(root, layout, "a", "f00")
    assert layout.references() == {}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "compressed"])
def test_an_archive_of_docker_save_gives_the_same_image(layout, tmp_path, pack):
    settings = config(BASE, CODE)
    files = {"blobs/one": pack(BASE), "two/layer.tar": pack(CODE), "settings.json": settings}
    manifest = [{"Config": "settings.json", "RepoTags": ["a"], "Layers": ["blobs/one", "two/layer.tar"]}]
    archive = tmp_path / "image.tar"
    archive.write_bytes(layer(**files, **{"manifest.json": json.dumps(manifest).encode()}))
    layout.path.mkdir()
    docker_archive.add(archive, layout, "a")
    assert [path.read_bytes() for path in layout.layers("a")] == [BASE, CODE]
    assert layout.blob(layout.manifest("a")["config"]["digest"]).read_bytes() == settings
