"""Runs the cluster inside its namespaces: configures them, starts the components, and exits with any of them.

python -m tools.cluster.node.supervisor SETTINGS: the only child of the init process of new PID, mount and network
namespaces. When this init process ends, all processes, mounts, interfaces and rules of the cluster end with it.
"""

from __future__ import annotations

import logging
import platform
import select
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import yaml

from tools.cluster import identity
from tools.cluster.client import ApiError
from tools.cluster.controlplane import START_SECONDS, ControlPlane
from tools.cluster.node import cgroups, configs, images, mounts, network, oci, policies, volumes
from tools.cluster.node.place import API_PORT, INSIDE, Place, inside
from tools.cluster.node.settings import Settings
from tools.cluster.node.system import CommandError, run
from tools.images.layout import Layout

_CHECK_SECONDS = 0.5
_RECYCLE_SECONDS = 2.0
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_log = logging.getLogger("supervisor")


class NodePlane(ControlPlane):
    """A control plane with one node, in the namespaces of this process."""

    ALL = (
        "containerd",
        "etcd",
        "apiserver",
        "controller-manager",
        "scheduler",
        "kube-proxy",
        "kubelet",
        "coredns",
    )
    STORAGE = Path(__file__).with_name("storage-class.yaml")

    def __init__(self, settings: Settings, place: Place) -> None:
        self._settings, self._place = settings, place
        self.address, self.context = settings.address, place.name
        self.users = {
            **{name: identity.USERS[name] for name in ("admin", "controller-manager", "scheduler")},
            "kubelet": (f"system:node:{place.name}", "system:nodes"),
            "kube-proxy": ("system:kube-proxy", ""),
            "coredns": ("coredns", ""),
        }
        initial_objects = self._place.state / "objects.yaml"
        super().__init__(self.ALL, [initial_objects], {"apiserver": ["--enable-admission-plugins=NodeRestriction"]})
        found = [*configs.objects(self.address), *volumes.make(self._place.volumes)]
        initial_objects.write_text(yaml.safe_dump_all(found))

    def _programs(self) -> Path:
        return INSIDE / self._settings.controlplane

    def _home(self) -> Path:
        return self._place.state

    def _ports(self) -> dict[str, int]:
        return {"etcd": 2379, "etcd-peer": 2380, "apiserver": API_PORT}

    def _start(self) -> None:
        configs.write(self._place, Path(self._settings.plugins), self._settings.pod_memory)
        self._start_runtime()
        super()._start()
        self._until(self._node_is_ready, "the node to be ready")
        self._until(self._names_are_served, "CoreDNS to answer")

    def _start_runtime(self) -> None:
        """Start containerd without containers of an earlier start, and import the pause image."""
        for name in ("io.containerd.runtime.v2.task", "io.containerd.grpc.v1.cri"):
            shutil.rmtree(self._place.content / name, ignore_errors=True)
        self.start("containerd")
        if containers := run(*images.CTR, "containers", "list", "--quiet").split():
            run(*images.CTR, "containers", "delete", *containers)
            self.stop("containerd")
            self.start("containerd")  # its CRI plugin caches the list of containers
        program = INSIDE / self._settings.pause / "pause"
        layout = Layout(self._place.state / "pause")
        oci.add_program(layout, program, configs.PAUSE, _ARCHITECTURES[platform.machine()])
        images.Images().load(layout, [configs.PAUSE])

    def start(self, name: str) -> None:
        """Start a component and wait until it answers."""
        super().start(name)
        if name == "containerd":
            self._until(self._runtime_is_ready, "containerd to answer")

    def _until(self, probe: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not probe():
            self._check(deadline, f"waited for {what}")

    def _runtime_is_ready(self) -> bool:
        try:
            run(*images.CTR, "version")
        except CommandError:
            return False
        return True

    def _node_is_ready(self) -> bool:
        try:
            node = self.api.get(f"/api/v1/nodes/{self.context}")
        except ApiError:
            return False  # not registered yet
        conditions = {found["type"]: found["status"] for found in node["status"].get("conditions", [])}
        return conditions.get("Ready") == "True" and not node["spec"].get("taints")

    def _names_are_served(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{configs.DNS_READY}/ready", timeout=1)
        except (urllib.error.URLError, TimeoutError):
            return False
        return True

    def _command(self, name: str) -> list[str]:
        known = _COMMANDS.get(name)
        return known(self) if known else super()._command(name)


def _containerd(plane: NodePlane) -> list[str]:
    return ["containerd", f"--config={plane.directory / 'containerd.toml'}"]


def _kubelet(plane: NodePlane) -> list[str]:
    return [
        str(plane.bin / "kubelet"),
        f"--config={plane.directory / 'kubelet.json'}",
        f"--kubeconfig={plane.directory / 'kubelet.kubeconfig'}",
        f"--hostname-override={plane.context}",
        f"--node-ip={plane.address}",
    ]


def _proxy(plane: NodePlane) -> list[str]:
    return [
        str(plane.bin / "kube-proxy"),
        f"--kubeconfig={plane.directory / 'kube-proxy.kubeconfig'}",
        f"--hostname-override={plane.context}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={network.PODS}",
        # Settings of the whole machine, which must not change.
        "--conntrack-max-per-core=0",
        "--conntrack-min=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--oom-score-adj=0",
    ]


def _coredns(plane: NodePlane) -> list[str]:
    return [str(INSIDE / plane._settings.coredns / "coredns"), f"-conf={plane.directory / 'Corefile'}"]


_COMMANDS: dict[str, Callable[[NodePlane], list[str]]] = {
    "containerd": _containerd,
    "kubelet": _kubelet,
    "kube-proxy": _proxy,
    "coredns": _coredns,
}


def main() -> int:
    """Run the cluster until a component exits, or the process with the write end of the tether exits."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    settings = Settings.read(sys.argv[1])
    start = time.monotonic()
    place = inside(settings.cluster)
    mounts.set_up(Path(settings.cache), place, settings.address)
    run("hostname", place.name)
    network.set_up(settings.address, settings.prefix)
    cgroups.make(place.name)
    with NodePlane(settings, place) as plane:
        place.ready.touch()
        _log.info("ready after %.1f s", time.monotonic() - start)
        try:
            _watch(plane, settings.tether)
        except RuntimeError as error:
            _log.error("%s", error)
            return 1
    return 0


def _watch(plane: NodePlane, tether: int | None) -> None:
    enforcer = policies.Enforcer(plane.api, plane.address)
    enforcer.start()
    recycled = time.monotonic()
    while True:
        plane.check()
        try:
            enforcer.update()
            if time.monotonic() > recycled + _RECYCLE_SECONDS:
                volumes.recycle(plane.api)
                recycled = time.monotonic()
        except (ApiError, CommandError, OSError, HTTPException) as error:
            _log.warning("%s", error)  # a concurrent change or a busy machine; the next round retries
        if tether is None:
            time.sleep(_CHECK_SECONDS)
        elif select.select([tether], [], [], _CHECK_SECONDS)[0]:
            _log.info("the process that started the cluster has exited")
            return


if __name__ == "__main__":
    sys.exit(main())
