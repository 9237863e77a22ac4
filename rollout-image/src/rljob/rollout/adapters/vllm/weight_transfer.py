"""Receives weights inside each worker of vLLM.

A weight transfer engine of vLLM, based on :class:`rljob.transfer.receiver.WeightReceiver`. Every worker receives every
tensor, and vLLM's layerwise reload loads the worker's part of it into the model: with tensor parallelism slices, with
pipeline parallelism some layers. This module adds:

- On CPU, the packed copy of a tied ``lm_head`` is packed again, because vLLM does not refresh it. So are the weights of
  experts, which vLLM packs after the first loading only (in bfloat16: with AMX, on ARM and on POWER).
- After a failed update, the layers get their previous tensors back, so that another update can follow. Their weights
  may be a mixture: the agent keeps the engine paused until an update succeeds.

vLLM finds this module through ``--worker-extension-cls``; importing it registers the transfer engine.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeAlias, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from rljob.protocol.parent_death import die_with_parent
from rljob.protocol.shared_messages import ParameterMeta
from rljob.rollout.adapters.vllm.expected_warnings import RELOADING, is_reload_warning
from rljob.rollout.log_filter import drop_records
from rljob.transfer.nccl_log import PROCESS_LOG
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import Rendezvous
from rljob.transfer.rounds import LoadWeights

log = logging.getLogger(f"vllm.{__name__}")
"""vLLM configures the loggers below `vllm`."""
log.setLevel(logging.INFO)  # few lines, and vLLM's default here is WARNING

BACKEND = "rljob"
ProcessWeights: TypeAlias = Callable[[Any, torch.nn.Module], None]


@dataclass(kw_only=True)
class JoinInfo(WeightTransferInitInfo):
    """Where the weight group is; see PrepareWeights."""

    transport: str
    group: str
    address: str
    port: int
    world_size: int
    bucket_bytes: int
    timeout_seconds: float


@dataclass(kw_only=True)
class RoundInfo(WeightTransferUpdateInfo):
    """The tensors of one update, in wire order, and how long it may take."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    timeout_seconds: float


class VllmWeightTransfer(WeightTransferEngine[JoinInfo, RoundInfo]):
    """Joins, receives and loads; called by vLLM's worker."""

    init_info_cls = JoinInfo
    update_info_cls = RoundInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = WeightReceiver(str(self.device))
        if torch.device(self.device).type == "cuda":
            PROCESS_LOG.start()
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        drop_records(RELOADING, partial(is_reload_warning, tied=tied))
        parent = multiprocessing.parent_process()  # the engine process, or the server if the worker is a part of it
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Leave the current group, if any, and join this one.

        Raises:
            RuntimeError: the sender is absent, did not join in time, or does not know the nonce.
        """
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        rendezvous = Rendezvous(init_info.group, init_info.address, init_info.port, init_info.world_size)
        self.receiver.join(rendezvous, rank, init_info.transport, init_info.bucket_bytes, init_info.timeout_seconds)
        if init_info.transport == "nccl":
            log.info("NCCL connects the trainer by %s", PROCESS_LOG.transports())

    def receive_weights(self, update_info: RoundInfo) -> None:
        """Receive one round and load it.

        Raises:
            RuntimeError: no group is joined, or the sender died or is too slow. The group is left.
        """
        names = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        parameters = [ParameterMeta(*meta) for meta in names]
        try:
            self.receiver.receive(parameters, cast(LoadWeights, self.model.load_weights), update_info.timeout_seconds)
        except BaseException:  # re-raised; the layers must be restored after a cancellation too
            _restore_layers(self.model)
            raise

    def start_weight_update(self) -> None:
        """Prepare the model for loading."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Commit the loaded tensors."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                _repack(module)

    def shutdown(self) -> None:
        """Leave the group."""
        self.receiver.leave()


class WorkerExtension:
    """Methods added to vLLM's worker, for collective_rpc. The attributes are those of the worker.

    The methods return a :class:`~rljob.rollout.adapters.worker_results.WorkerResult` as a dictionary and never
    raise. A worker that fails leaves the weight group, so that the other members fail too, and at once.
    """

    weight_transfer_engine: VllmWeightTransfer
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def rljob_join(self, group: dict[str, Any]) -> dict[str, str]:
        """Join a weight group. ``group``: a :class:`JoinInfo`."""
        return self._result(lambda: self.init_weight_transfer_engine(group))

    def rljob_receive(self, update: dict[str, Any]) -> dict[str, str]:
        """Receive one update and commit it, unless a worker received other bytes. ``update``: a :class:`RoundInfo`."""

        def receive() -> None:
            self.start_weight_update()
            self.update_weights(update)
            self.finish_weight_update()

        return self._result(receive)

    def _result(self, call: Callable[[], None]) -> dict[str, str]:
        try:
            call()
        except Exception as error:  # any error is an answer: see the class
            log.exception("a call of this worker failed")
            self.weight_transfer_engine.shutdown()
            return {"digest": "", "error": f"{type(error).__name__}: {error}"}
        return {"digest": self.weight_transfer_engine.receiver.digest, "error": ""}


def _restore_layers(model: torch.nn.Module) -> None:
    """Restore the tensors of every layer that waits for weights, and drop the tensors it received. Otherwise the next
    update would count them as received and commit a mixture."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def packing_again(process: ProcessWeights) -> ProcessWeights:
    """Return vLLM's method of layers with experts, changed so that the kernel of a CPU packs the weights after each
    loading."""

    @wraps(process)
    def process_and_pack(method: Any, layer: torch.nn.Module) -> None:
        again = method.moe_kernel is not None
        process(method, layer)
        if again and layer.w13_weight.device.type == "cpu":
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return process_and_pack


def _repack(lm_head: torch.nn.Module) -> None:
    if lm_head.weight.device.type == "cpu" and hasattr(lm_head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(lm_head, remove_weight=False)


_experts: Any = UnquantizedFusedMoEMethod
_experts.process_weights_after_loading = packing_again(_experts.process_weights_after_loading)
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, VllmWeightTransfer)
