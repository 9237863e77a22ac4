"""The memory of all pods together can be limited, so that a test can cause evictions without using up the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.cluster.node import configs, life, machine
from tools.cluster.node.place import Place


def kubelet(tmp_path: Path, pods: int | None) -> dict:
    """Return the kubelet's configuration."""
    place = Place(tmp_path)
    place.state.mkdir(parents=True, exist_ok=True)
    configs.write(place, tmp_path, pods)
    return json.loads((place.state / "kubelet.json").read_text())


def test_a_limit_reserves_the_rest_of_the_machine(tmp_path: Path):
    found = kubelet(tmp_path, 2**30)
    assert found["systemReserved"] == {"memory": str(configs.machine_memory() - 2**30)}
    assert found["evictionHard"]["memory.available"] == configs.EVICTED_BELOW
    assert found["evictionHard"]["nodefs.available"] == "1%"


def test_without_a_limit_nothing_is_reserved(tmp_path: Path):
    found = kubelet(tmp_path, None)
    assert "systemReserved" not in found and found["evictionHard"] == configs.EVICTION


@pytest.mark.parametrize("wrong", ["0", "six", "-1", "1.5", "99999999"])
def test_a_wrong_limit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, wrong: str):
    monkeypatch.setenv(life.POD_MEMORY, wrong)
    with pytest.raises(machine.MachineError, match=f"{life.POD_MEMORY}: must be a number of GiB between 1 and"):
        life._pod_memory()


def test_a_limit_is_in_gibibytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(life.POD_MEMORY, "1")
    assert life._pod_memory() == 2**30
    monkeypatch.delenv(life.POD_MEMORY)
    assert life._pod_memory() is None
