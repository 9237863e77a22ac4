"""A real Kubernetes control plane for tests, up in seconds: etcd, API server, controllers, scheduler, kwok's nodes.

All files are in a temporary directory; the processes die with the program that started them. Authorization is RBAC,
admission is Kubernetes' default plus OwnerReferencesPermissionEnforcement, as strict clusters have it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.cluster import build, commands, directory, identity
from tools.cluster.access import Access
from tools.cluster.client import Api, ApiError
from tools.cluster.commands import ADDRESS
from tools.cluster.pods import Pods
from tools.cluster.processes import Process, ResourceStack, free_port

NODE_SELECTOR = "type=kwok"
START_SECONDS = 120.0
_HERE = Path(__file__).parent


class ControlPlane(ResourceStack, Access):
    """A control plane; use it as a context manager.

    ``components`` are started in order; any of them can be stopped and started again. ``manifests`` (paths of YAML
    files, such as CustomResourceDefinitions) are applied before the controllers start, since the garbage collector
    learns of later ones only within half a minute. ``flags``: component → more flags. ``version`` of Kubernetes: see
    :func:`tools.cluster.build.control_plane`.
    """

    ALL: tuple[str, ...] = ("etcd", "apiserver", "controller-manager", "scheduler", "kwok")
    users = identity.USERS
    STORAGE = _HERE / "storage-class.yaml"
    address = ADDRESS
    """Address of the API server."""

    def __init__(
        self,
        components: Sequence[str] = ALL,
        manifests: Sequence[Path] = (),
        flags: Mapping[str, Sequence[str]] | None = None,
        version: str | None = None,
    ) -> None:
        assert set(components) <= set(self.ALL), components
        self._components, self._manifests, self._flags = components, manifests, dict(flags or {})
        self._version = version
        super().__init__()
        self.processes: dict[str, Process] = {}
        """The running components."""

    # --- start and stop -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if "kwok" in self._components:
            build.ensure("kwok")  # before anything runs: a first build takes minutes
        self.bin = self._programs()
        """The directory with kubectl and the components."""
        self.directory = self._home()
        """The working directory; NAME.log is the log of a component."""
        self._stack.callback(self._kill_all)
        self._start()

    def _programs(self) -> Path:
        return build.ensure(build.control_plane(self._version))

    def _home(self) -> Path:
        return self._stack.enter_context(directory.directory())

    def _ports(self) -> dict[str, int]:
        return {name: free_port(ADDRESS) for name in ("etcd", "etcd-peer", "apiserver")}

    def _start(self) -> None:
        self._tokens = identity.tokens(self.directory / "tokens.csv", self.users)
        identity.signing_key(self.directory / "service-account.key")
        self.ports = self._ports()
        """Component → port."""
        self.url = f"https://{self.address}:{self.ports['apiserver']}"
        """Address of the API server."""
        self.authority = self.directory / "certificates" / "apiserver.crt"
        """The certificate authority of the API server."""
        self._launch("etcd")
        self._launch("apiserver")
        self._wait_certificate(self.authority)
        self.api = self.client(self._tokens["admin"])
        """Administrator client."""
        self.pods = Pods(self.api)
        """Controls the simulated pods."""
        for name, token in self._tokens.items():
            self._kubeconfig(name, token)
        self.kubeconfig = self.directory / "admin.kubeconfig"
        """The administrator's kubeconfig."""
        self._wait_ready()
        self.install([self.STORAGE, *self._manifests])
        for name in self._components:
            if name not in self.processes:
                self._launch(name)

    def start(self, name: str) -> None:
        """Start a stopped component; wait until the API server or etcd answers."""
        assert name not in self.processes, f"{name} runs"
        self._launch(name)
        if {"etcd", "apiserver"} <= set(self.processes):
            self._wait_ready()

    def stop(self, name: str) -> None:
        """Stop a component at once, as if its machine had lost power."""
        self.processes.pop(name).kill()

    def check(self) -> None:
        """Raise if a component has exited, with the end of its log."""
        for process in self.processes.values():
            process.check()

    def restore(self) -> None:
        """Start stopped components in order, and resume paused ones."""
        self.check()
        for process in self.processes.values():
            process.resume()
        for name in self._components:
            if name not in self.processes:
                self.start(name)

    def _kill_all(self) -> None:
        for name in reversed(list(self.processes)):
            self.stop(name)

    def _launch(self, name: str) -> None:
        command = [*self._command(name), *self._flags.get(name, ())]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.directory)}
        self.processes[name] = Process(name, command, self.directory / f"{name}.log", environment)

    def _command(self, name: str) -> list[str]:
        return _COMMANDS[name](self)

    def _wait_certificate(self, path: Path) -> None:
        """Return when the file is complete: the API server creates it empty."""
        deadline = time.monotonic() + START_SECONDS
        while not path.exists() or not path.read_text().endswith("-----END CERTIFICATE-----\n"):
            self._check(deadline, "the API server wrote no certificate")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        last_error: object = None
        while True:
            try:
                self.api.get("/readyz")
                self.api.get("/api/v1/namespaces/kube-system")  # needs etcd, which readyz checks only from time to time
                return
            except (ApiError, OSError) as error:
                last_error = error
            self._check(deadline, f"the API server is not ready: {last_error}")

    def _check(self, deadline: float, problem: str) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} within {START_SECONDS:g} s; see {self.directory}")
        time.sleep(0.05)

    # --- access -------------------------------------------------------------------------------------------------------

    def client(self, token: str) -> Api:
        """Return a client with the rights of ``token``."""
        api = Api(self.address, self.ports["apiserver"], self.authority, token)
        self._stack.callback(api.close)
        return api

    # --- contents -----------------------------------------------------------------------------------------------------

    def nodes(
        self,
        count: int,
        gpus: int = 8,
        cpu: str = "64",
        memory: str = "512Gi",
        labels: Mapping[str, str] | None = None,
        taints: Sequence[Mapping[str, str]] = (),
    ) -> list[str]:
        """Create nodes that kwok simulates; return their names when they are Ready."""
        capacity: dict[str, Any] = {"cpu": cpu, "memory": memory, "pods": "1000", "ephemeral-storage": "1Ti"}
        if gpus:
            capacity["nvidia.com/gpu"] = str(gpus)
        names = [f"node-{secrets.token_hex(4)}" for _ in range(count)]
        kind, _, value = NODE_SELECTOR.partition("=")
        for name in names:
            self.api.post(
                "/api/v1/nodes",
                {
                    "metadata": {
                        "name": name,
                        "labels": {kind: value, "kubernetes.io/hostname": name, **(labels or {})},
                    },
                    "spec": {"taints": [dict(taint) for taint in taints]},
                    "status": {"capacity": capacity, "allocatable": capacity},
                },
            )
        for name in names:
            self.api.wait_condition(f"/api/v1/nodes/{name}", "Ready")
        return names

    def resident_bytes(self) -> dict[str, int]:
        """Return the resident memory of each component in bytes."""
        return {name: process.resident_bytes() for name, process in self.processes.items()}


def _kwok(plane: ControlPlane) -> list[str]:
    return [
        str(build.ensure("kwok") / "kwok"),
        f"--kubeconfig={plane.directory / 'kwok.kubeconfig'}",
        f"--config={_HERE / 'stages.yaml'}",
        f"--manage-nodes-with-label-selector={NODE_SELECTOR}",
        "--manage-all-nodes=false",
        "--node-lease-duration-seconds=200",
    ]


_COMMANDS: dict[str, Callable[[ControlPlane], list[str]]] = {
    "etcd": commands.etcd,
    "apiserver": commands.apiserver,
    "controller-manager": commands.controller_manager,
    "scheduler": commands.scheduler,
    "kwok": _kwok,
}
