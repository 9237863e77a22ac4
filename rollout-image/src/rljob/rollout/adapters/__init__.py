"""Inference engines by the name a manifest gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rljob.api.roles import Rollout
from rljob.rollout.adapters.base import Adapter
from rljob.rollout.adapters.vllm import VllmAdapter

ADAPTERS: dict[str, Callable[[Rollout, Path], Adapter]] = {"vllm": VllmAdapter}
