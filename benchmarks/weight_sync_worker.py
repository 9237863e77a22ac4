"""A worker of vLLM that loads weights from its own memory, for the benchmark of weight updates."""

from __future__ import annotations

import time
from typing import Any

from safetensors.torch import load_file

from rljob.rollout.adapters.vllm.weight_transfer import WorkerExtension


class LocalLoad(WorkerExtension):
    """The extension of rljob, with one more method."""

    def benchmark_load(self, model: str) -> float:
        """Load a model from memory as an update does; return the seconds.

        Args:
            model: directory with a model.safetensors, which is read before the clock starts.
        """
        tensors = list(load_file(f"{model}/model.safetensors").items())
        loaded: Any = self.weight_transfer_engine.model
        started = time.perf_counter()
        self.start_weight_update()
        loaded.load_weights(tensors)
        self.finish_weight_update()
        return time.perf_counter() - started
