"""The gang: the trainer and the least engines of each pool, which are of no use without one another."""

from __future__ import annotations

from typing import Any

from rljob.manifests import labels as l
from rljob.manifests.scene import Scene

GANG = "gang"
ELASTIC = "elastic"


def tier(which: str) -> dict[str, str]:
    """Return the label that tells the gang's pods from elastic ones."""
    return {l.TIER: which}


def near_the_gang(scene: Scene, which: str) -> dict[str, Any]:
    """Return the fields of a PodSpec that place the gang's pods as scheduling.topology says.

    The gang's pods must be near one another, elastic ones should be: they are no reason to place the gang elsewhere.
    """
    topology = scene.job.spec.scheduling.topology
    if topology is None:
        return {}
    term = {
        "labelSelector": {"matchLabels": l.selector(scene.job.metadata.name) | tier(GANG)},
        "topologyKey": topology.key,
    }
    if which == GANG:
        return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}}
