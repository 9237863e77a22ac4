"""What this machine computes on."""

from __future__ import annotations

from pathlib import Path

from rljob.api.kubernetes import Accelerator

GPU = Path("/dev/nvidiactl")
"""Is there when the machine, or this container of it, has NVIDIA GPUs."""


def environment(accelerator: Accelerator) -> dict[str, str]:
    """Return the variables that keep a part to what its role is to compute on."""
    return {"CUDA_VISIBLE_DEVICES": ""} if accelerator.kind == "cpu" else {}
