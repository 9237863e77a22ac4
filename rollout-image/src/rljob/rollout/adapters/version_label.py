"""Labels under which engines serve weights: the lineage and the version of an update, as text."""

from __future__ import annotations

from rljob.protocol.agent_protocol import PrepareWeights
from rljob.rollout.adapters.base import INITIAL_VERSION


def version_label(update: PrepareWeights) -> str:
    """Return the label of the weights of ``update``."""
    return f"{update.lineage}.{update.version}"


def labelled_version(label: str) -> int:
    """Return the policy version of a :func:`version_label`; INITIAL_VERSION for any other label."""
    number = label.rpartition(".")[2]
    return int(number) if number.isdigit() else INITIAL_VERSION
