"""The settings of the node's components, and the initial objects of a cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools.cluster.client import Object, Objects
from tools.cluster.node.network import BRIDGE, PODS
from tools.cluster.node.place import SOCKET, Place

DNS = "10.96.0.10"
DOMAIN = "cluster.local"
DNS_READY = "127.0.0.1:8181"
PAUSE = "localhost/pause:rljob"
EVICTION = dict.fromkeys(("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "1%")
"""Thresholds below which the kubelet evicts pods."""
EVICTED_BELOW = "512Mi"
"""The threshold of memory, if the memory of pods is limited. The kubelet looks every ten seconds."""


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write(place: Place, plugins: Path, pod_memory: int | None = None) -> None:
    """Write the configuration files of the components. ``pod_memory``: bytes for all pods together."""
    _json(place.state / "cni" / "10-pods.conflist", _cni())
    _json(place.state / "kubelet.json", _kubelet(place) | _memory(pod_memory))
    (place.state / "containerd.toml").write_text(_containerd(place, plugins))
    (place.state / "Corefile").write_text(_corefile(place))


def objects(address: str) -> Objects:
    """Return the objects of the name server, which is a process on the node behind the Service kube-dns."""
    ports = [
        {"name": name, "port": 53, "protocol": protocol} for name, protocol in (("dns", "UDP"), ("dns-tcp", "TCP"))
    ]
    kube_dns = {"name": "kube-dns", "namespace": "kube-system"}
    reads = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": "coredns"}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": kube_dns, "spec": {"clusterIP": DNS, "ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**kube_dns, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": ports,
        },
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "coredns"}, "rules": reads},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "coredns"},
            "roleRef": role,
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "coredns"}],
        },
    ]


def _json(path: Path, content: Object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _cni() -> Object:
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,  # a Service may route a pod's request to the same pod
        "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def _kubelet(place: Place) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{place.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # a lower value needs CAP_SYS_RESOURCE
        "clusterDNS": [DNS],
        "clusterDomain": DOMAIN,
        "resolvConf": str(place.state / "resolv.conf"),
        "volumePluginDir": str(place.state / "volume-plugins"),
        # Only the API server reaches the kubelet (network.py). It has no certificate that the kubelet could check.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        # Images are a cache of the machine; the cluster must not free the machine's disk.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": EVICTION,
        "maxPods": 250,
        "podPidsLimit": -1,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
    }


def _memory(pods: int | None) -> dict[str, Any]:
    """Return the settings of a kubelet that leaves ``pods`` bytes for pods: it evicts before their cgroup is full."""
    if pods is None:
        return {}
    return {
        "systemReserved": {"memory": str(max(0, machine_memory() - pods))},
        "evictionHard": EVICTION | {"memory.available": EVICTED_BELOW},
        "evictionPressureTransitionPeriod": "10s",
    }


def _containerd(place: Place, plugins: Path) -> str:
    return f"""version = 2
root = "{place.content}"
state = "/run/containerd"
# Not needed; the second would make directories in /opt.
disabled_plugins = [
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{SOCKET}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true # without CAP_SYS_RESOURCE no sandbox starts otherwise
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{place.state / "cni"}"
"""


def _corefile(place: Place) -> str:
    return f""".:53 {{
  errors
  ready {DNS_READY}
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig {place.state / "coredns.kubeconfig"}
    pods insecure
    ttl 5
  }}
}}
"""
