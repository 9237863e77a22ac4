"""Persistent volumes of the node: directories, each bound to one claim at a time and emptied after its deletion."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.cluster.client import Api, Object, Objects

COUNT = 32
CLASS = "node-volume"
_COLLECTION = "/api/v1/persistentvolumes"
_WORLD_WRITABLE = 0o777  # the kubelet does not apply fsGroup to hostPath, and pods run as various users


def make(directory: Path) -> Objects:
    """Create the directories and return their PersistentVolumes; their capacity is not enforced."""
    return [_volume(f"volume-{i:02}", directory) for i in range(COUNT)]


def _volume(name: str, directory: Path) -> Object:
    path = directory / name
    path.mkdir(parents=True)
    path.chmod(_WORLD_WRITABLE)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def recycle(api: Api) -> None:
    """Empty the volumes whose claim was deleted and make them available again."""
    for volume in api.list(_COLLECTION):
        if volume["spec"].get("storageClassName") == CLASS and volume["status"].get("phase") == "Released":
            _empty(Path(volume["spec"]["hostPath"]["path"]))
            change = [{"op": "remove", "path": "/spec/claimRef"}]
            api.patch(f"{_COLLECTION}/{volume['metadata']['name']}", change, "json")


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # a terminating pod may still write
        else:
            path.unlink(missing_ok=True)
