"""Adapters of the two engines."""

from __future__ import annotations

from mypackage.engine import TableEngine

from rljob.rollout.adapters.base import Launch
from rljob.rollout.adapters.vllm.adapter import VllmAdapter


class CorruptTorch(TableEngine):
    """The page's engine, for a transformers model."""

    program = "corrupt.server"


class CorruptVllm(VllmAdapter):
    """vLLM."""

    def launch(self, port: int, key: str) -> Launch:
        """Return the command of vLLM, with another extension of its workers."""
        launch = super().launch(port, key)
        command = list(launch.command)
        command[command.index("--worker-extension-cls") + 1] = "corrupt.vllm_worker.CorruptExtension"
        return Launch(command, launch.environment)
