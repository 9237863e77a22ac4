"""Receives weights inside SGLang's schedulers, the processes that have the model: one for each tensor-parallel rank.

:func:`install` puts :class:`rljob.transfer.receiver.WeightReceiver` in the place of SGLang's own receiver, which knows
neither the nonce of a weight group nor a digest nor a time limit. Routes, sessions, pauses, the loading of tensors and
the labels of versions stay SGLang's. An update is one call with four steps: begin; receive, load and compare the
digests; finish and clear the cache; label. A failure in between leaves the session open: the weights may be a mixture,
the agent keeps the engine paused, and the next update continues in the session.

SGLang gives every request to all schedulers of the engine, and answers with what the first one returns. So they tell
each other the result of each step. None begins a step before all have succeeded with the one before, and all answer the
same: no scheduler finishes or labels what another one refuses. If one dies, their exchange fails, and SGLang ends the
server. A receiver's calls have time limits. Loading, finishing and clearing have none: if one of them never ends, the
agent's own limit is reached, and the agent replaces the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqOutput,
    UpdateWeightsFromDistributedReqOutput,
)

from rljob.protocol.exit_codes import FAILURE
from rljob.protocol.shared_messages import ParameterMeta
from rljob.rollout.adapters.sglang.sglang_orders import SglangGroup, SglangRound
from rljob.rollout.adapters.worker_results import WorkerResult, agreed_digest
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
            rank = request.rank_offset + dist.get_rank(manager.tp_cpu_group)
            receiver = self._receiver = self._receiver or WeightReceiver(_device(manager))
            receiver.join(rendezvous, rank, request.backend, order.bucket_bytes, order.timeout_seconds)
            if request.backend == "nccl":
                log.info("NCCL connects the trainer by %s", PROCESS_LOG.transports())
            return ""

        return self._answer(InitWeightsUpdateGroupReqOutput, manager, join)

    def receive(self, manager: Any, request: Any) -> Any:
        """Answer /update_weights_from_distributed: receive one round and commit it; the message is its digest."""

        def begin() -> str:
            if manager._session is None:
                _call_with_barrier(manager, manager.begin_weight_update, BeginWeightUpdateReqInput())
            return ""

        def receive() -> str:
            if self._receiver is None:
                raise RuntimeError("no weight group is joined")
            order = msgspec.json.decode(request.group_name, type=SglangRound)
            metas = zip(request.names, request.dtypes, request.shapes, strict=True)
            parameters = [ParameterMeta(name, dtype, list(shape)) for name, dtype, shape in metas]
            updater = manager.tp_worker.model_runner.weight_updater

            def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
                require(updater.load_weights_from_distributed(tensors))

            self._receiver.receive(parameters, load, order.timeout_seconds)
            return self._receiver.digest

        def finish() -> str:
            manager._session = msgspec.structs.replace(manager._session, loaded_weights=True)
            _call_with_barrier(manager, manager.end_weight_update, EndWeightUpdateReqInput())
            require(manager.flush_cache_after_weight_update(request, True, ""))
            return self._digest

        def label() -> str:
            manager.record_weight_version_after_update(request.weight_version)
            return self._digest

        return self._answer(UpdateWeightsFromDistributedReqOutput, manager, begin, receive, finish, label)

    @property
    def _digest(self) -> str:
        return "" if self._receiver is None else self._receiver.digest

    def _answer(self, output: Callable[..., Any], manager: Any, *steps: Callable[[], str]) -> Any:
        """Carry out the steps in all schedulers, and return SGLang's answer: the digest that they received, or their
        errors, after which no group is joined."""
        digest = ""
        for step in steps:
            results = _exchange(manager.tp_cpu_group, self._result(step))
            try:
                digest = agreed_digest(results)
            except RuntimeError as error:
                self._leave()
                return output(success=False, message=str(error))
        return output(success=True, message=digest)

    def _result(self, step: Callable[[], str]) -> WorkerResult:
        try:
            return WorkerResult(step(), "")
        except Exception as error:  # any error is an answer to the agent; raising would end the server
            log.exception("a call of the weight receiver failed")
            self._leave()  # the other members of the group fail at once
            return WorkerResult("", f"{type(error).__name__}: {error}")

    def _leave(self) -> None:
        if self._receiver is not None:
            self._receiver.leave()


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


def _exchange(group: Any, own: WorkerResult) -> list[WorkerResult]:
    """Return the results of all schedulers, by rank; ``own`` is that of this one.

    Raises:
        RuntimeError: a scheduler died.
    """
    results = [own] * dist.get_world_size(group)
    if len(results) > 1:
        dist.all_gather_object(results, own, group=group)
    return results


def _call_with_barrier(manager: Any, call: Callable[[Any], object], request: object) -> None:
    """Call a method of SGLang that ends with a barrier of all schedulers.

    If it fails in one of several, the others wait in the barrier, and would take its next message for its arrival. So
    this process ends, and SGLang ends the server.
    """
    try:
        call(request)
    except Exception:
        if dist.get_world_size(manager.tp_cpu_group) == 1:
            raise
        log.exception("the engine's workers are not in step any more")
        os._exit(FAILURE)


def _device(manager: Any) -> str:
    """Return the scheduler's device in the form of torch."""
    runner = manager.tp_worker.model_runner
    if runner.device != "cuda":
        return str(runner.device)
    PROCESS_LOG.start()
    return f"cuda:{runner.gpu_id}"
