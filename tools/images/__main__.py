"""Builds the container images: `make images`.

python -m tools.images build [NAME...] [--tag TAG] [--registry HOST/PATH] [--variant cpu|gpu] [--base IMAGE]
                             [--engine NAME]
python -m tools.images path    prints the directory of the OCI layout with the images
python -m tools.images clean   deletes the layout and all builds
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import sys
from pathlib import Path

from tools.images.base import NoBaseError
from tools.images.building import Order, build
from tools.images.engines import EngineError
from tools.images.plan import DELIVERED

TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
REGISTRY = re.compile(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
"""Form of a registry by https://github.com/distribution/reference, without rare forms."""


def cache() -> Path:
    """Return the directory of all build results, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rljob", "images")


def main() -> int:
    """Run the command; return exit code 1 if it fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m tools.images", description="The container images of rljob.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build missing images")
    building.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(DELIVERED)}; default: all")
    building.add_argument("--tag", default="dev", help="default: dev")
    building.add_argument("--registry", default="", help="registry to push to, such as registry.example.com/rljob")
    building.add_argument("--variant", default="cpu", choices=("cpu", "gpu"), help="default: cpu")
    building.add_argument("--base", default="", help="a Debian-like image with Python 3.11 or later, or debootstrap")
    building.add_argument(
        "--engine", default="", choices=("docker", "podman", "buildah"), help="default: the first that works"
    )
    commands.add_parser("path", help="print the directory of the OCI layout")
    commands.add_parser("clean", help="delete the layout and all builds")
    arguments = parser.parse_args()
    if arguments.command == "path":
        sys.stdout.write(f"{cache() / 'oci'}\n")
        return 0
    if arguments.command == "clean":
        shutil.rmtree(cache(), ignore_errors=True)
        return 0
    unknown = set(arguments.names) - set(DELIVERED)
    if unknown:
        parser.error(f"there is no image {' or '.join(sorted(unknown))}; there are {', '.join(DELIVERED)}")
    if not TAG.fullmatch(arguments.tag):
        parser.error(f"TAG {arguments.tag!r} is not a valid tag: use letters, digits and ._-, and begin with no . or -")
    if arguments.registry and not REGISTRY.fullmatch(arguments.registry):
        parser.error(
            f"REGISTRY {arguments.registry!r} is not a valid registry: use HOST[:PORT][/PATH] in lower case, such as "
            "registry.example.com/rljob"
        )
    order = Order(
        names=tuple(arguments.names) or DELIVERED,
        tag=arguments.tag,
        registry=arguments.registry,
        variant=arguments.variant,
        base=arguments.base,
        engine=arguments.engine,
    )
    try:
        build(order, cache())
    except (EngineError, NoBaseError) as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
