"""The command lines of a control plane's components, with simulated or real nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

ADDRESS = "127.0.0.1"
RATE = ("--kube-api-qps=1000", "--kube-api-burst=2000")  # tests must not wait for a client's rate limiter
SERVICES = "10.96.0.0/16"
"""The range of Services' addresses."""


class Plane(Protocol):
    """Inputs of a component's command line."""

    bin: Path
    directory: Path
    address: str
    authority: Path
    ports: dict[str, int]


def etcd(plane: Plane) -> list[str]:
    """Return the command of etcd, without fsync."""
    client, peer = (f"http://{ADDRESS}:{plane.ports[name]}" for name in ("etcd", "etcd-peer"))
    return [
        str(plane.bin / "etcd"),
        f"--data-dir={plane.directory / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(plane: Plane) -> list[str]:
    """Return the command of the API server."""
    key = plane.directory / "service-account.key"
    return [
        str(plane.bin / "kube-apiserver"),
        f"--etcd-servers=http://{ADDRESS}:{plane.ports['etcd']}",
        f"--bind-address={plane.address}",
        f"--advertise-address={plane.address}",
        f"--secure-port={plane.ports['apiserver']}",
        f"--cert-dir={plane.directory / 'certificates'}",  # the API server creates its certificate there
        # A loopback address is not a valid endpoint.
        *(["--endpoint-reconciler-type=none"] if plane.address == ADDRESS else []),
        f"--service-cluster-ip-range={SERVICES}",
        f"--token-auth-file={plane.directory / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
    ]


def controller_manager(plane: Plane) -> list[str]:
    """Return the command of the controllers."""
    return [
        str(plane.bin / "kube-controller-manager"),
        f"--kubeconfig={plane.directory / 'controller-manager.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={plane.directory / 'service-account.key'}",
        f"--root-ca-file={plane.authority}",
        "--node-monitor-grace-period=600s",  # on a busy machine a node may report late
        *RATE,
    ]


def scheduler(plane: Plane) -> list[str]:
    """Return the command of the scheduler."""
    return [
        str(plane.bin / "kube-scheduler"),
        f"--kubeconfig={plane.directory / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
        *RATE,
    ]
