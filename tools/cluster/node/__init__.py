"""A real Kubernetes cluster with one node on this machine: kubelet, containerd, a pod network, kube-proxy, CoreDNS.

The cluster has its own PID, mount and network namespaces. The machine reaches the API server over one link; the cluster
cannot reach the machine. When the init process of the PID namespace ends, the kernel removes processes, mounts,
interfaces and rules; only cgroups and files are removed explicitly.

    with Node() as node:  # uses the running cluster, or starts one and stops it at the end
        node.load(layout, ["localhost/rljob-operator:dev"])
        namespace = node.namespace("test")
        node.kubectl("apply", "-n", namespace, "-f", "-", stdin=...)

`life` starts and stops it from outside; `supervisor` is its first process and starts the others.
"""

from tools.cluster.node.existing import Existing, NotAllowedError, context
from tools.cluster.node.life import NoClusterError
from tools.cluster.node.machine import MachineError
from tools.cluster.node.node import Node
from tools.cluster.node.real import Cluster

__all__ = ["Cluster", "Existing", "MachineError", "NoClusterError", "Node", "NotAllowedError", "chosen"]


def chosen(asked: str | None = None) -> Node | Existing:
    """Return the cluster to use: of the context ``asked``, of the context in RLJOB_E2E_CONTEXT, or of this machine.

    Raises:
        NotAllowedError: the requested context is not allowed.
    """
    name = context(asked)
    return Existing(name) if name else Node()
