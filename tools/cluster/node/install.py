"""Installs rljob as users do: both charts with helm, with the images of `make images`."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.cluster import build
from tools.cluster.access import Access
from tools.cluster.client import ApiError
from tools.cluster.node.real import LOCAL, Cluster
from tools.images.layout import Layout

NAMESPACE = "rljob-system"
TAG = "dev"
IMAGES = ("operator", "coordinator", "runner", "trainer", "rollout", "rewards", "environments")
"""Names of the images in the values of the charts; the image of NAME is rljob-NAME."""
_CHARTS = Path(__file__).parents[3] / "charts"
_TIMEOUT = "3m"
_log = logging.getLogger(__name__)


class InstallError(RuntimeError):
    """rljob could not be installed; the message has the cause."""


class NoImagesError(InstallError):
    """An image has not been built; the message names it."""


@dataclass(frozen=True)
class Installation:
    """An installation of rljob in a cluster."""

    cluster: Access
    images: Mapping[str, str] = field(default_factory=dict)
    """Image by its short name (operator, trainer, ...)."""
    namespace: str = NAMESPACE


def layout() -> Path:
    """Return the directory of the built images."""
    return build.cache_directory().parent / "images" / "oci"


def names(registry: str = LOCAL, tag: str = TAG) -> dict[str, str]:
    """Return short name → image reference."""
    return {name: f"{registry}/rljob-{name}:{tag}".lstrip("/") for name in IMAGES}


def from_layout(cluster: Cluster, tag: str = TAG) -> Installation:
    """Load the built images into the cluster and install rljob with them, or with those of its registry.

    Raises:
        NoImagesError: the operator's image is not built; a job reports other missing images in its conditions.
        InstallError: helm failed.
    """
    images = names(cluster.registry, tag)
    if cluster.registry != LOCAL:
        return install(cluster, images)
    built = Layout(layout()).references()
    missing = [image for image in images.values() if image not in built]
    if images["operator"] in missing:
        raise NoImagesError(f"{images['operator']} is not built: run make images")
    if missing:
        _log.warning("not built: %s; run make images", ", ".join(missing))
    cluster.load(layout(), [image for image in images.values() if image in built])
    cluster.keep(list(built))
    return install(cluster, images, built[images["operator"]])


def install(cluster: Access, images: Mapping[str, str], version: str = "") -> Installation:
    """Install or upgrade both charts; another ``version`` replaces the operator's pods also with the same image name.

    Installations into one cluster wait for each other: helm refuses a release on which another helm works.

    Raises:
        InstallError: helm failed; a partial installation remains.
    """
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    try:
        cluster.api.apply_object(body, "cluster")
    except ApiError as error:
        raise InstallError(f"the namespace {NAMESPACE} cannot be created: {error}") from error
    with (cluster.directory / "install.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _helm(cluster, "rljob-crds", {})
        _helm(cluster, "rljob", values(images, version))
    return Installation(cluster, dict(images))


def values(images: Mapping[str, str], version: str) -> dict[str, Any]:
    """Return the values of the chart: these images, and settings of a small cluster."""
    return {
        "replicas": 1,
        "images": {**images, "pullPolicy": "IfNotPresent"},
        "jobs": {"accelerator": "cpu"},
        "podAnnotations": {"rljob.dev/image": version},  # another image of the same name replaces the pods
    }


def _helm(cluster: Access, chart: str, chart_values: Mapping[str, Any]) -> None:
    command = [
        str(build.ensure("helm") / "helm"),
        "upgrade",
        chart,
        str(_CHARTS / chart),
        "--install",
        f"--namespace={NAMESPACE}",
        "--values=-",
        "--wait",
        f"--timeout={_TIMEOUT}",
    ]
    home = {"HOME": str(cluster.directory), "KUBECONFIG": str(cluster.kubeconfig)}
    done = subprocess.run(
        command, input=json.dumps(chart_values), capture_output=True, text=True, env=os.environ | home
    )
    if done.returncode != 0:
        raise InstallError(f"helm upgrade {chart} failed: {done.stderr.strip()[-2000:]}\n{_pods(cluster)}")


def _pods(cluster: Access) -> str:
    """Return the state of the operator's pods; helm reports only that they are not ready."""
    try:
        return cluster.kubectl("get", "pods,events", "-n", NAMESPACE)
    except RuntimeError as error:
        return str(error)
