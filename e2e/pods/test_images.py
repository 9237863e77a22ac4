"""What is in the images that were built, and that each starts as a strict cluster wants it."""

from __future__ import annotations

import json
import os
import re
import tarfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from tools.cluster.node import Cluster
from tools.cluster.node.install import layout, names
from tools.cluster.node.real import LOCAL
from tools.images import base, host, lists, plan
from tools.images.layout import Layout

LIGHT = {"operator", "coordinator", "runner", "rewards", "environments"}
HEAVY_MODULES = ("torch", "vllm", "transformers", "triton", "nvidia", "pip", "uv")
PROGRAMS = ("pip", "pip3", "uv", "gcc", "cc", "g++", "make", "git", "curl", "wget")
MAINS = {
    "operator": ("rljob.operator.main", "rljob.operator.handlers"),
    "coordinator": ("rljob.coordinator.main", "rljob.coordinator.serve"),
    "runner": ("rljob.runner.main", "rljob.runner.app"),
    "rewards": ("rljob.rewards.main", "rljob.rewards.sdk"),
    "environments": ("rljob.environments.main", "rljob.environments.environment_service"),
    "trainer": ("rljob.trainer.main", "rljob.trainer.loop"),
    "rollout": ("rljob.rollout.main", "vllm.entrypoints.launchers.api_server"),
}
"""Image → the module that it runs, and the one with everything that it imports to work."""
CODE_BYTES = 8 << 20
"""Bound of the layer with our code, sources and compiled files: an update of rljob downloads no more."""
MOST_STARTS = 30
"""Bound of the CPU time of importing a service: as much as this many starts of Python with asyncio and ssl."""
SCRIPT = """
import importlib.util, json, os, resource, shutil, subprocess, sys
heavy, programs, main, service, repeats = json.loads(sys.argv[1])
def there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
def seconds_of(program):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
tries = [(seconds_of("import asyncio, ssl")[1], *seconds_of(f"import {service}")) for _ in range(repeats)]
done = tries[0][1]
outside = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
started = subprocess.run([sys.executable, "-m", main], env=outside, capture_output=True, text=True)
print(json.dumps({
    "ids": [os.getuid(), os.getgid()],
    "modules": [module for module in heavy if there(module)],
    "programs": [program for program in programs if shutil.which(program)],
    "imported": done.returncode == 0 or done.stderr,
    "python": min(bare for bare, _, _ in tries),
    "seconds": min(whole for _, _, whole in tries),
    "exit": started.returncode,
    "said": started.stderr,
}))
"""


@dataclass(frozen=True)
class Built:
    """An image of the layout."""

    name: str
    layout: Layout

    @property
    def reference(self) -> str:
        return names()[self.name]

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.layout.config(self.reference)

    @property
    def layers(self) -> list[Path]:
        return self.layout.layers(self.reference)

    def files(self) -> list[str]:
        """The names of all files, lowest layer first."""
        return [name for layer in self.layers for name, is_file in members(layer) if is_file]


@cache
def members(layer: Path) -> list[tuple[str, bool]]:
    with tarfile.open(layer, "r:") as archive:
        return [(member.name.removeprefix("./"), not member.isdir()) for member in archive]


@pytest.fixture(params=plan.DELIVERED)
def image(request: pytest.FixtureRequest) -> Built:
    built = Built(request.param, Layout(layout()))
    if built.reference not in built.layout.references():
        pytest.fail(f"{built.reference} is not built: run make images")
    return built


def test_an_image_runs_as_nobody_with_nothing_of_the_machine_that_built_it(image: Built):
    assert image.config["config"]["User"] == "65532:65532"
    names = [entry.partition("=")[0] for entry in image.config["config"]["Env"]]
    assert [name for name in names if name != "LD_LIBRARY_PATH"] == ["PATH"]  # images with torch find the driver
    assert image.config["config"]["Env"][0].startswith("PATH=/opt/rljob/bin:")
    said = json.dumps(image.config)
    addresses = [value for name, value in os.environ.items() if name in host.LENT and re.match(r"https?://", value)]
    for address in [*addresses, str(Path.home()), "/run/host/", "http://", "https://"]:
        assert address not in said.replace("target=/run/host", ""), address


def test_an_image_holds_no_secret_no_cache_and_no_settings_of_the_machine(image: Built):
    forbidden = re.compile(
        r"run/host|run/secrets|etc/pip\.conf|etc/uv/|root/\.(cache|config|netrc|docker)|var/cache/(uv|apt)/."
        r"|var/lib/apt/lists/.|build/|.*\.(key|token)$|.*/\.git/"
    )
    assert [name for name in image.files() if forbidden.match(name)] == []
    trusted = [
        i for i, layer in enumerate(image.layers) if any(name.startswith("etc/ssl") for name, _ in members(layer))
    ]
    assert set(trusted) <= {0}  # those of the base image
    if "localhost/rljob-base" in json.dumps(image.config["history"]):
        with tarfile.open(image.layers[0], "r:") as archive:
            sources = archive.extractfile("etc/apt/sources.list")
            assert sources is not None
            assert sources.read().decode() == base.OFFICIAL.format(suite=base.release_here().suite)


def test_an_image_has_the_packages_of_its_list_at_the_pinned_versions_and_no_others(image: Built):
    variant = next(entry for entry in ("cpu", "gpu") if f"opt/rljob/requirements/{entry}.txt" in image.files())
    wanted = {
        "coordinator": ["coordinator"],
        "runner": ["coordinator"],
        "trainer": [f"torch-{variant}", "trainer"],
        "rollout": [f"torch-{variant}", f"rollout-{variant}"],
    }.get(image.name, [image.name])
    pinned = lists.pinned(variant)
    packages = {
        name: pinned[name] for file in wanted for name in (lists.LISTS / f"{file}.txt").read_text().split("\n")[1:-1]
    }
    found = dict(
        (name.replace("_", "-").replace(".", "-").lower(), version)
        for file in image.files()
        for name, version in re.findall(r"site-packages/([\w.]+)-([\w.+]+)\.dist-info/METADATA$", file)
    )
    ours = {name for name in found if name.split("-")[0] == "rljob"}
    assert {name: version for name, version in found.items() if name not in ours} == packages
    folders = lists.DISTRIBUTIONS[
        "coordinator" if image.name == "runner" else image.name
    ]  # two images of one Dockerfile
    assert ours == {lists.project(folder)["name"] for folder in folders}


def test_what_we_write_is_in_the_last_thin_layer(image: Built):
    last = image.layers[-1]
    ours = [any("/site-packages/rljob/" in name for name, _ in members(layer)) for layer in image.layers]
    assert ours == [False] * (len(ours) - 1) + [True]
    assert last.stat().st_size < CODE_BYTES
    python = [name for name, _ in members(last) if name.endswith(".py") and "/rljob/" in name]
    compiled = {name for name, _ in members(last) if name.endswith(".pyc")}
    assert len(compiled) >= len(python) > 10


def test_layers_exist_once():
    built = {name: Built(name, Layout(layout())).layers for name in plan.DELIVERED}
    assert built["coordinator"][:-1] == built["runner"][:-1]
    shared = [layer for layer in built["trainer"] if layer in built["rollout"]]
    assert sum(layer.stat().st_size for layer in shared) > 0.7 * sum(layer.stat().st_size for layer in built["trainer"])
    assert len({layers[0] for layers in built.values()}) == 1  # the base


def pod(name: str, reference: str, arguments: list[str]) -> dict[str, Any]:
    """A pod as the restricted standard wants it, which writes nowhere but in /tmp."""
    container = {
        "name": "main",
        "image": reference,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SCRIPT, *arguments],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def references(node: Cluster) -> dict[str, str]:
    """Image → its name in the cluster, which has it."""
    found = names(node.registry)
    if node.registry == LOCAL:
        node.load(layout(), list(found.values()))
    return found


@pytest.mark.parametrize("component", plan.DELIVERED)
def test_an_image_works_in_a_restricted_pod_and_is_light_where_it_should_be(
    component: str, node: Cluster, references: dict[str, str]
):
    namespace = node.namespace("images", {"pod-security.kubernetes.io/enforce": "restricted"})
    repeats = 3 if component in LIGHT else 1  # only the light ones must start within a time
    told = [json.dumps([HEAVY_MODULES, PROGRAMS, *MAINS[component], repeats])]
    node.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(pod(component, references[component], told)))
    wait = ("--for=jsonpath={.status.phase}=Succeeded", f"pod/{component}", "--timeout=120s")
    node.kubectl("wait", "-n", namespace, *wait)
    found = json.loads(node.logs(namespace, component).splitlines()[-1])
    assert found["imported"] is True
    assert found["ids"] == [65532, 65532]
    assert found["programs"] == []
    assert found["exit"] == 2 and "is not set" in found["said"]  # it runs, and says what it lacks
    if component in LIGHT:
        assert found["modules"] == []
        # In starts of Python, as other pods use the same cores; a heavy module takes as much again. Measured: 12 to 20.
        starts = found["seconds"] / found["python"]
        assert starts < MOST_STARTS, f"{found['seconds']:.2f} s of CPU"
