"""Builds the programs of a cluster and starts clusters from the command line.

python -m tools.cluster build [NAME...]   builds missing programs (those named, or all of the usual version)
python -m tools.cluster up [--nodes N]    starts a control plane, prints how to use it, and keeps it until Ctrl-C
python -m tools.cluster start [--tag T]   starts the real cluster; installs rljob if its images are built
python -m tools.cluster stop              stops it and removes all its files except the images
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from pathlib import Path

from tools.cluster import build, errors
from tools.cluster.controlplane import ControlPlane
from tools.cluster.node import Cluster, Node, chosen, install

ROOT = Path(__file__).parents[2]
_CHECK_SECONDS = 1.0


def main() -> int:
    """Run the command."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description="Real Kubernetes programs for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build missing programs")
    building.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(build.PROGRAMS)}; default: all of the usual version",
    )
    starting = commands.add_parser("up", help="start a control plane and keep it until Ctrl-C")
    starting.add_argument("--nodes", type=int, default=4, help="nodes simulated by kwok, 8 GPUs each (default: 4)")
    real = commands.add_parser("start", help="start the real cluster of one node, in the background")
    real.add_argument("--tag", default=install.TAG, help=f"tag of the images to install (default: {install.TAG})")
    real.add_argument("--context", help="install in this cluster instead; kind-…, or named by RLJOB_E2E_CONTEXT")
    commands.add_parser("stop", help="stop the real cluster and remove its files except the images")
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            return _build(arguments.names)
        if arguments.command == "start":
            return _start(arguments.tag, arguments.context)
        if arguments.command == "stop":
            return _stop()
        return _up(arguments.nodes)
    except errors.REFUSED as error:
        logging.error("%s", error)
        return 2
    except errors.FAILED as error:
        logging.error("%s", error)
        return 1


def _build(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(build.PROGRAMS)):
        logging.error("there is no program %s; there are %s", unknown[0], ", ".join(build.PROGRAMS))
        return 2
    for directory in build.ensure_all(names or build.usual()).values():
        sys.stdout.write(f"{directory}\n")
    return 0


def _up(nodes: int) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        start = time.monotonic()
        with ControlPlane(manifests=sorted(ROOT.glob("crds/*.yaml"))) as plane:
            plane.nodes(nodes)
            sys.stdout.write(
                f"Kubernetes is up after {time.monotonic() - start:.1f} s, with {nodes} nodes; in another terminal:\n\n"
                f"  export KUBECONFIG={plane.kubeconfig} PATH={plane.bin}:$PATH\n"
                "  kubectl get nodes\n\n"
                f"Logs are in {plane.directory}. Ctrl-C stops it and removes all its files.\n"
            )
            sys.stdout.flush()
            while True:
                time.sleep(_CHECK_SECONDS)
                plane.check()
    return 0


def _start(tag: str, context: str | None) -> int:
    start = time.monotonic()
    node = chosen(context)
    if not isinstance(node, Node):
        with node:
            sys.stdout.write(f"In the cluster of {node.context}: {_install(node, tag)}.\n")
        return 0
    ran = node.runs
    result = _install(node.start(), tag)
    up = "ran already" if ran else f"is up after {time.monotonic() - start:.1f} s"
    sys.stdout.write(
        f"The cluster {up}. {result}. In a shell:\n\n"
        f"  export KUBECONFIG={node.kubeconfig} PATH={node.bin}:$PATH:{Path(sys.executable).parent}\n"
        "  kubectl apply -f examples/quickstart.yaml\n\n"
        "make cluster-down stops it and removes all its files but the images.\n"
    )
    return 0


def _install(cluster: Cluster, tag: str) -> str:
    """Install rljob and return a message with the result."""
    try:
        install.from_layout(cluster, tag)
    except install.NoImagesError as error:
        return f"Not installed: {error}"
    return f"Installed: rljob from the images {tag}"


def _stop() -> int:
    ran = Node().stop()
    sys.stdout.write("The cluster has stopped.\n" if ran else "No cluster ran.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
