"""An NFS server in the network of the cluster, NFS-Ganesha, and volumes whose pods mount it.

The kubelet mounts a volume of type ``nfs`` with mount(8), which calls mount.nfs: once for each pod, so every pod is a
client of its own. Within the cluster mount.nfs is the client of mount_nfs.c, on every machine: many kernels of virtual
machines have no NFS. Server and client come from Debian (`requirements/system.sh PYTHON nfs`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tools.cluster.client import Object
from tools.cluster.node import Node, life
from tools.cluster.node.machine import PATH
from tools.cluster.node.place import INSIDE, outside
from tools.cluster.node.system import run
from tools.cluster.processes import Process, ResourceStack, tail

CLASS = "nfs"
"""StorageClass of the volume."""
_HERE = Path(__file__).parent
_NFS_PORT, _MOUNT_PORT = 2049, 20048
_START_SECONDS = 60.0
_INITIALIZED = b"NFS SERVER INITIALIZED"
_RUN_DIRECTORIES = ("/run/rpcbind", "/run/ganesha", "/var/lib/nfs/ganesha")
_CONFIGURATION = """
NFS_CORE_PARAM {{
    Protocols = 3;
    NFS_Port = {nfs_port};
    MNT_Port = {mount_port};
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
}}
NFSV4 {{ Graceless = true; }}
EXPORT {{
    Export_Id = 1;
    Path = {path};
    Pseudo = /volume;
    Access_Type = RW;
    Squash = No_Root_Squash;
    SecType = sys;
    Protocols = 3;
    Transports = TCP;
    FSAL {{ Name = VFS; }}
}}
"""


class NfsServer(ResourceStack):
    """The server, its export and one PersistentVolume of it; use it as a context manager.

    Args:
        node: this machine's cluster, which runs. No pod may use the volume any more at the end.
    """

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        init = life.running(outside())
        assert init is not None, "no cluster runs"
        self._init = str(init)
        self._home = outside().state / "nfs"
        self._inside = INSIDE / self._home.relative_to(outside().root.parent)
        self.export = self._home / "export"
        """The exported directory, as the server sees it: without caches of a client."""
        self._process: Process | None = None

    def _open(self) -> None:
        self.export.mkdir(parents=True)
        self.export.chmod(0o777)  # the kubelet sets no group on NFS
        self._stack.callback(run, "rm", "-rf", str(self._home))
        text = _CONFIGURATION.format(nfs_port=_NFS_PORT, mount_port=_MOUNT_PORT, path=self._inside / "export")
        (self._home / "ganesha.conf").write_text(text)
        self._install_client()
        self._enter("mkdir", "-p", *_RUN_DIRECTORIES)
        portmapper = self._start_process("rpcbind", ["rpcbind", "-f"])
        self._stack.callback(portmapper.kill)
        self._stack.callback(self.kill)
        self.start()
        self._create_volume()

    def start(self) -> None:
        """Start the server, or start it again after :meth:`kill`."""
        assert self._process is None, "it runs"
        command = ["ganesha.nfsd", "-F", "-f", str(self._inside / "ganesha.conf"), "-L", "STDOUT"]
        log = self._home / "ganesha.log"
        log.unlink(missing_ok=True)
        self._process = self._start_process("ganesha", [*command, "-p", "/run/ganesha/ganesha.pid"])
        deadline = time.monotonic() + _START_SECONDS
        while _INITIALIZED not in log.read_bytes():
            self._process.check()
            assert time.monotonic() < deadline, f"the NFS server does not start: {tail(log)}"
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server with SIGKILL; clients wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _install_client(self) -> None:
        """Build mount_nfs.c, and let the cluster, not this machine, find it as mount.nfs."""
        program = self._home / "mount.nfs"
        libraries = run("pkg-config", "--cflags", "--libs", "fuse3", "libnfs").split()
        run("cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(_HERE / "mount_nfs.c"), *libraries)
        self._enter("mount", "--bind", str(self._inside / program.name), "/sbin/mount.nfs")
        self._stack.callback(self._enter, "umount", "--lazy", "/sbin/mount.nfs")

    def _create_volume(self) -> None:
        objects = {"/apis/storage.k8s.io/v1/storageclasses": _storage_class(), "/api/v1/persistentvolumes": self._pv()}
        for path, body in objects.items():
            self._node.api.post(path, body)
            self._stack.callback(self._node.api.delete, f"{path}/{body['metadata']['name']}")

    def _pv(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "nfs"},
            "spec": {
                "capacity": {"storage": "1Ti"},
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": CLASS,
                "mountOptions": [f"port={_NFS_PORT}", f"mountport={_MOUNT_PORT}"],
                "nfs": {"server": "127.0.0.1", "path": str(self._inside / "export")},
            },
        }

    def _start_process(self, name: str, command: Sequence[str]) -> Process:
        return Process(name, self._inner(*command), self._home / f"{name}.log", {"PATH": PATH})

    def _enter(self, *command: str) -> str:
        return run(*self._inner(*command))

    def _inner(self, *command: str) -> list[str]:
        """Return the command within the cluster. The PID namespace too: /proc there is that of its processes."""
        return ["nsenter", "--target", self._init, "--mount", "--net", "--pid", *command]


def _storage_class() -> Object:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
