"""The accelerators of this machine."""

from __future__ import annotations

from pathlib import Path

from rljob.api.cluster import Accelerator

GPU = Path("/dev/nvidiactl")
"""Exists if the machine, or this container, has NVIDIA GPUs."""


def environment(accelerator: Accelerator) -> dict[str, str]:
    """Return the variables that restrict a component to the accelerator of its role."""
    return {"CUDA_VISIBLE_DEVICES": ""} if accelerator.kind == "cpu" else {}
