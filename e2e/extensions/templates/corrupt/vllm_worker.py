"""vLLM's worker, with one corrupted update."""

import corrupt.wire  # noqa: F401
from rljob.rollout.adapters.vllm.weight_transfer import WorkerExtension


class CorruptExtension(WorkerExtension):
    """The extension, loaded after the receiver was changed."""
