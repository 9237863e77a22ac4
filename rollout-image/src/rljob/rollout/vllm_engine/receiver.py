"""Receives weights inside a vLLM worker.

One of vLLM's weight transfer engines: the wire format is that of :mod:`rljob.protocol.weights`, over gloo or NCCL, and
every operation has a deadline. Loading into the model is vLLM's own (its layerwise reload). What is added to it:

- On CPU the packed copy of a tied ``lm_head`` is made anew; vLLM never refreshes it.
- An update that failed puts the layers back in working order, so that another can follow. Their weights are then a
  mixture: the agent keeps the engine paused until an update succeeds.

vLLM finds this module through ``--worker-extension-cls``; importing it registers the transfer engine.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, cast

import blake3
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from rljob.protocol.messages import ParameterMeta
from rljob.protocol.weights import plan_buckets
from rljob.rollout.vllm_engine.parentage import die_with_parent
from rljob.rollout.vllm_engine.quiet import leave_out_expected

BACKEND = "rljob"
POLL_SECONDS = 0.001
Group: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"
LoadWeights: TypeAlias = Callable[[list[tuple[str, torch.Tensor]]], object]
_abandoned: list[Group] = []


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


class WeightReceiver(WeightTransferEngine[JoinInfo, RoundInfo]):
    """The worker's end of a weight group."""

    init_info_cls = JoinInfo
    update_info_cls = RoundInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digest = ""
        self._group: Group | None = None
        self._bucket_bytes = 0
        self._wire_device = "cpu"
        leave_out_expected(bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)))
        server = multiprocessing.parent_process()
        if server is not None and server.pid is not None:
            die_with_parent(server.pid)

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Leave the group joined before, if any, and join this one.

        Raises:
            RuntimeError: the sender is not there, or not in time.
        """
        self.shutdown()
        self._bucket_bytes = init_info.bucket_bytes
        self._wire_device = "cpu" if init_info.transport == "gloo" else str(self.device)
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = _join(init_info, rank)

    def receive_weights(self, update_info: RoundInfo) -> None:
        """Receive one round and load it.

        Raises:
            RuntimeError: no group is joined, or the sender died or is too slow. The group is left.
        """
        if self._group is None:
            raise RuntimeError("no weight group is joined")
        deadline = time.monotonic() + update_info.timeout_seconds
        try:
            self.digest = self._receive(self._group, update_info, deadline)
        except BaseException:
            self.shutdown()
            _restore_layers(self.model)
            raise

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Commit what was loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                _repack(module)

    def shutdown(self) -> None:
        """Leave the group. It is set aside, not destroyed: its threads may wait for a dead peer."""
        group, self._group = self._group, None
        if group is not None:
            _abandoned.append(group)
            threading.Thread(target=group.abort, daemon=True, name="abort-weight-group").start()

    def _receive(self, group: Group, info: RoundInfo, deadline: float) -> str:
        metas = [ParameterMeta(*meta) for meta in zip(info.names, info.dtypes, info.shapes, strict=True)]
        hasher = blake3.blake3()
        for bucket in plan_buckets(metas, self._bucket_bytes):
            tensors = [(metas[i], getattr(torch, metas[i].dtype)) for i in bucket]
            sizes = [torch.Size(meta.shape).numel() * dtype.itemsize for meta, dtype in tensors]
            packed = torch.empty(sum(sizes), dtype=torch.uint8, device=self._wire_device)
            _broadcast(group, packed, 0, deadline)
            hasher.update(packed.cpu().numpy().data)
            load = cast(LoadWeights, self.model.load_weights)
            load(
                [
                    (meta.name, _aligned(raw, dtype).view(dtype).view(meta.shape))
                    for (meta, dtype), raw in zip(tensors, packed.split(sizes), strict=True)
                ]
            )
        receipt = torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8).to(self._wire_device)
        for rank in range(1, group.size()):
            mine = rank == group.rank()
            _broadcast(group, receipt if mine else torch.empty_like(receipt), rank, deadline)
        return hasher.hexdigest()


class WorkerExtension:
    """Methods added to vLLM's worker, for /collective_rpc."""

    weight_transfer_engine: WeightReceiver

    def rljob_weights_digest(self) -> str:
        """Return the digest of the bytes of the last round received, blake3 hex."""
        return self.weight_transfer_engine.digest


def _join(info: JoinInfo, rank: int) -> Group:
    timeout = timedelta(seconds=info.timeout_seconds)
    client = dist.TCPStore(info.address, info.port, is_master=False, timeout=timeout, wait_for_workers=False)
    store = dist.PrefixStore(info.group, client)
    if info.transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=365)  # deadlines are ours: the watchdog's would end the process
        return dist.ProcessGroupNCCL(store, rank, info.world_size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(info.address))]
    return dist.ProcessGroupGloo(store, rank, info.world_size, options)


def _broadcast(group: Group, tensor: torch.Tensor, root: int, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise RuntimeError("the weights took too long")
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, timedelta(seconds=remaining)
    work = group.broadcast([tensor], options)  # type: ignore[union-attr]  # not in the stub
    if tensor.device.type == "cpu":
        work.wait(timedelta(seconds=remaining))
        return
    while not work.is_completed():  # waiting for NCCL in the stream would never raise
        if time.monotonic() > deadline:
            raise RuntimeError("the weights took too long")
        time.sleep(POLL_SECONDS)


def _aligned(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()


def _restore_layers(model: torch.nn.Module) -> None:
    """Give every layer that waits for weights its own tensors back and forget what it was given: left as it is, the
    next update would count this one's tensors as its own and commit a mixture."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def _repack(lm_head: torch.nn.Module) -> None:
    if lm_head.weight.device.type == "cpu" and hasattr(lm_head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(lm_head, remove_weight=False)


def _address_towards(host: str) -> str:
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
