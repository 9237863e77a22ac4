"""A real Kubernetes cluster with one node on this machine: kubelet, containerd, a pod network, kube-proxy, CoreDNS.

All of it is in PID, mount and network namespaces of its own. The machine reaches its API server over one link, and it
reaches nothing of the machine. With the init of its PID namespace all of it is gone at once: processes, mounts,
interfaces, rules; only cgroups and files are removed by hand.

    with Node() as node:  # the one that runs, or a new one, which is stopped again
        node.load(layout, ["localhost/rljob-operator:dev"])
        namespace = node.namespace("test")
        node.kubectl("apply", "-n", namespace, "-f", "-", stdin=...)

`life` starts and ends it from outside; `supervisor` is its first process, which starts the rest.
"""

from tools.cluster.node.existing import Existing, NotAllowedError, context
from tools.cluster.node.life import NoClusterError
from tools.cluster.node.machine import MachineError
from tools.cluster.node.node import Node
from tools.cluster.node.real import Cluster

__all__ = ["Cluster", "Existing", "MachineError", "NoClusterError", "Node", "NotAllowedError", "chosen"]


def chosen(asked: str | None = None) -> Node | Existing:
    """Return the cluster to use: that of the context ``asked`` for, or of RLJOB_E2E_CONTEXT, or this machine's own.

    Raises:
        NotAllowedError: the one that is asked for is not allowed.
    """
    name = context(asked)
    return Existing(name) if name else Node()
