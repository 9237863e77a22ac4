"""Receives weights inside SGLang's scheduler, the process that has the model.

:func:`install` puts :class:`rljob.transfer.receiver.WeightReceiver` in the place of SGLang's own receiver, which knows
neither the nonce of a weight group nor a digest nor a time limit. Routes, sessions, pauses, the loading of tensors and
the labels of versions stay SGLang's. An update is one call: begin, receive and load, compare the digests, finish, clear
the cache, label. A failure in between leaves the session open: the weights may be a mixture, the agent keeps the engine
paused, and the next update continues in the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqOutput,
    UpdateWeightsFromDistributedReqOutput,
)

from rljob.protocol.shared_messages import ParameterMeta
from rljob.rollout.adapters.sglang.sglang_orders import SglangGroup, SglangRound
from rljob.transfer.nccl_log import PROCESS_LOG
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import Rendezvous

log = logging.getLogger(__name__)


class SglangReceiver:
    """Weight receiver of one scheduler process. ``manager`` is SGLang's SchedulerWeightUpdaterManager."""

    def __init__(self) -> None:
        self._receiver: WeightReceiver | None = None

    def join(self, manager: Any, request: Any) -> Any:
        """Answer /init_weights_update_group: leave the current group, if any, and join this one."""

        def join() -> str:
            order = msgspec.json.decode(request.group_name, type=SglangGroup)
            rendezvous = Rendezvous(order.group, request.master_address, request.master_port, request.world_size)
            receiver = self._receiver = self._receiver or WeightReceiver(_device(manager))
            receiver.join(rendezvous, request.rank_offset, request.backend, order.bucket_bytes, order.timeout_seconds)
            if request.backend == "nccl":
                log.info("NCCL connects the trainer by %s", PROCESS_LOG.transports())
            return "joined"

        return self._answer(InitWeightsUpdateGroupReqOutput, join)

    def receive(self, manager: Any, request: Any) -> Any:
        """Answer /update_weights_from_distributed: receive one round and commit it; the message is its digest."""

        def receive() -> str:
            if self._receiver is None:
                raise RuntimeError("no weight group is joined")
            order = msgspec.json.decode(request.group_name, type=SglangRound)
            metas = zip(request.names, request.dtypes, request.shapes, strict=True)
            parameters = [ParameterMeta(name, dtype, list(shape)) for name, dtype, shape in metas]
            if manager._session is None:
                manager.begin_weight_update(BeginWeightUpdateReqInput())
            updater = manager.tp_worker.model_runner.weight_updater

            def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
                require(updater.load_weights_from_distributed(tensors))

            self._receiver.receive(parameters, load, order.timeout_seconds)
            manager._session = msgspec.structs.replace(manager._session, loaded_weights=True)
            manager.end_weight_update(EndWeightUpdateReqInput())
            require(manager.flush_cache_after_weight_update(request, True, ""))
            manager.record_weight_version_after_update(request.weight_version)
            return self._receiver.digest

        return self._answer(UpdateWeightsFromDistributedReqOutput, receive)

    def _answer(self, output: Callable[..., Any], call: Callable[[], str]) -> Any:
        """Return SGLang's answer: the result of ``call``, or its error, after which no group is joined."""
        try:
            return output(success=True, message=call())
        except Exception as error:  # any error is an answer to the agent; raising would end the server
            log.exception("a call of the weight receiver failed")
            if self._receiver is not None:
                self._receiver.leave()
            return output(success=False, message=f"{type(error).__name__}: {error}")


def install(manager: Any) -> None:
    """Let ``manager``, SGLang's SchedulerWeightUpdaterManager, receive with rljob's receiver."""
    receiver = SglangReceiver()
    manager.init_weights_update_group = lambda self, request: receiver.join(self, request)
    manager.update_weights_from_distributed = lambda self, request: receiver.receive(self, request)


def require(result: tuple[bool, str]) -> None:
    """Raise RuntimeError with the message of a result of SGLang that is no success."""
    success, message = result
    if not success:
        raise RuntimeError(message)


def _device(manager: Any) -> str:
    """Return the scheduler's device in the form of torch."""
    runner = manager.tp_worker.model_runner
    if runner.device != "cuda":
        return str(runner.device)
    PROCESS_LOG.start()
    return f"cuda:{runner.gpu_id}"
