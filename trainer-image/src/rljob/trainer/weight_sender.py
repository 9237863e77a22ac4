"""Sends weights to engines: one group per engine, so that the death of an engine affects no other engine.

The trainer's rank 0 owns one :class:`WeightSender` and calls :meth:`WeightSender.send` from one thread per engine.
Each operation has the remaining part of ``timeout_seconds`` as its time limit; see :mod:`rljob.transfer.weight_group`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from rljob.transfer.bucket_wires import WIRES
from rljob.transfer.nccl_log import PROCESS_LOG
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.rendezvous import ABANDONED, Rendezvous, RendezvousListener
from rljob.transfer.rounds import send_round
from rljob.transfer.weight_group import WeightGroup

log = logging.getLogger(__name__)


class WeightTransferError(Exception):
    """An engine did not receive the weights; its group is dropped."""


@dataclass(eq=False)
class _Opened:
    listener: RendezvousListener
    group: WeightGroup | None = None
    used: float = field(default_factory=time.monotonic)
    sending: threading.Lock = field(default_factory=threading.Lock)


class WeightSender:
    """Weight groups of engines, opened on demand and kept between updates.

    Args:
        host: address of this process that engines can reach.
        timeout_seconds: time limit of one :meth:`send`, including the engine's joining.
        transport: gloo, nccl or ipc.
    """

    def __init__(self, host: str, timeout_seconds: float, transport: str) -> None:
        if transport not in WIRES:
            raise ValueError(f"there is no weight transport {transport!r}; use {', '.join(WIRES)}")
        self._host = host
        self._timeout = timeout_seconds
        self._transport = transport
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()

    def open(self, engine: str, fresh: bool, workers: int = 1) -> Rendezvous:
        """Return the rendezvous of the engine's group; of a new group if there is none, or if ``fresh``. Does not wait:
        the engine joins while :meth:`send` waits for it. ``workers``: of the engine, which all take part."""
        with self._lock:
            opened = self._opened.get(engine)
            if opened is not None and not fresh:
                opened.used = time.monotonic()
                return opened.listener.rendezvous
            if opened is not None:
                self._forget(engine, opened)
            listener = RendezvousListener(self._host, 1 + workers)
            self._opened[engine] = _Opened(listener)
            return listener.rendezvous

    def send(self, engine: str, weights: PackedWeights) -> str:
        """Send ``weights`` to ``engine`` and return their digest, hex.

        Blocks until the engine has joined and received everything.

        Raises:
            WeightTransferError: no group is open, or the engine did not take part in time, died, or received other
                bytes. The group is dropped; open a new one to try again.
        """
        with self._lock:
            opened = self._opened.get(engine)
        if opened is None:
            raise WeightTransferError(f"no weight group is open to engine {engine}; open one first")
        with opened.sending:
            try:
                deadline = time.monotonic() + self._timeout
                group = opened.group or self._form(engine, opened)
                return send_round(group, weights, deadline)
            except (RuntimeError, ValueError, OSError) as error:
                with self._lock:
                    if self._opened.get(engine) is opened:
                        self._forget(engine, opened)
                reason = str(error).partition("\n")[0]
                raise WeightTransferError(f"engine {engine} did not receive the weights: {reason}") from error

    def close(self, engine: str) -> None:
        """Forget the engine's group, if any. A send in progress fails: at once before the engine has joined, later by
        its deadline."""
        with self._lock:
            opened = self._opened.get(engine)
            if opened is not None:
                self._forget(engine, opened)

    def close_idle(self, seconds: float) -> None:
        """Forget groups that were not opened in the last ``seconds``: their engines are gone, or will join new groups.
        Each group holds sockets and threads."""
        oldest = time.monotonic() - seconds
        with self._lock:
            for engine, opened in list(self._opened.items()):
                if opened.used < oldest and not opened.sending.locked():
                    self._forget(engine, opened)

    def _form(self, engine: str, opened: _Opened) -> WeightGroup:
        group = WeightGroup.host(opened.listener, self._transport, self._timeout)
        if self._transport == "nccl":
            log.info("NCCL connects engine %s by %s", engine, PROCESS_LOG.transports())
        with self._lock:
            if self._opened.get(engine) is opened:
                opened.group = group
                return group
        group.abandon()
        raise RuntimeError(ABANDONED)

    def _forget(self, engine: str, opened: _Opened) -> None:
        del self._opened[engine]
        opened.listener.close()
        if opened.group is not None:
            opened.group.abandon()
