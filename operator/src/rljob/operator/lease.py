"""Leader election by a Lease of coordination.k8s.io, with the semantics of client-go's leaderelection.

Clocks of machines are never compared: the lease of another candidate has expired when it has not changed for its
duration by the *local* monotonic clock. A leader that could not renew for ``renew_seconds`` (less than the duration)
stops writing and its process ends; writes in flight time out before the duration is over. So the next leader is the
only one that writes.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rljob.kube.errors import AlreadyExistsError, ApiError, NotFoundError
from rljob.operator.object_kinds import LEASES
from rljob.operator.operator_client import OperatorClient

log = logging.getLogger(__name__)

JITTER = 1.2


class LeaseLostError(Exception):
    """The lease could not be renewed in time, or another candidate holds it."""


class LeaseSpec(msgspec.Struct, rename="camel"):
    """`spec` of a Lease."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Lease(msgspec.Struct):
    metadata: _Meta
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)


class Lease:
    """One candidate.

    Args:
        identity: of this candidate; unique.
        duration_seconds: time without a renewal after which other candidates take the lease.
        renew_seconds: time for which a leader tries to renew; less than the duration.
        retry_seconds: pause between attempts.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: OperatorClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_seconds: float = 15.0,
        renew_seconds: float = 10.0,
        retry_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._namespace, self._name, self._identity = client, namespace, name, identity
        self._duration, self._renew, self._retry = duration_seconds, renew_seconds, retry_seconds
        self._clock = clock
        self._observed: _Lease | None = None
        self._observed_at = 0.0
        self._stale = False
        """A write failed: the lease may differ from the one that was observed last."""
        self._renewed_at = float("-inf")
        """Time at which the last successful renewal was sent: the lease is held from that time."""

    @property
    def held(self) -> bool:
        """Whether this candidate is the leader and may write."""
        return self._clock() < self._renewed_at + self._renew

    async def acquire(self) -> None:
        """Return when this candidate is the leader."""
        while not await self._try():
            await asyncio.sleep(self._retry * random.uniform(1.0, JITTER))
        log.info("%s is the leader by lease %s/%s", self._identity, self._namespace, self._name)

    async def keep(self) -> None:
        """Renew the lease. Never returns.

        Raises:
            LeaseLostError: it could not be renewed in time.
        """
        while True:
            await asyncio.sleep(self._retry)
            left = self._renewed_at + self._renew - self._clock()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    renewed = await self._try()
            except TimeoutError:
                renewed = False
            if not renewed and (not self.held or self._held_by_other()):
                self._renewed_at = float("-inf")
                raise LeaseLostError(f"the lease {self._namespace}/{self._name} could not be renewed in time")

    async def release(self) -> None:
        """Release the lease, so that another candidate can take it at once. The caller must not write after this."""
        if not self.held or self._observed is None:
            return
        self._renewed_at = float("-inf")
        try:
            # Read again: the last renewal may have been cancelled before its answer.
            self.observe(msgspec.json.decode(await self._client.get(LEASES, self._namespace, self._name), type=_Lease))
            if self._held_by_other():
                return
            spec = LeaseSpec("", 1, _now(), _now(), self._observed.spec.lease_transitions)
            await self._client.update(LEASES, self._namespace, self._name, self._body(self._observed, spec))
        except ApiError as error:
            log.warning("the lease could not be released, the next leader waits until it expires: %s", error)

    def may_take(self, spec: LeaseSpec) -> bool:
        """Return whether the lease can be taken: it has no holder, this candidate holds it, or it has expired."""
        if not spec.holder_identity or spec.holder_identity == self._identity:
            return True
        return self._clock() >= self._observed_at + (spec.lease_duration_seconds or self._duration)

    def observe(self, lease: _Lease) -> None:
        """Record the lease; its duration starts again if it has changed."""
        if self._observed is None or self._observed.metadata.resource_version != lease.metadata.resource_version:
            self._observed, self._observed_at = lease, self._clock()

    def _held_by_other(self) -> bool:
        return self._observed is not None and self._observed.spec.holder_identity not in (self._identity, "", None)

    async def _try(self) -> bool:
        """Take or renew the lease; return whether that succeeded."""
        began = self._clock()
        try:
            written = await self._write()
        except ApiError as error:
            log.info("lease %s/%s: %s", self._namespace, self._name, error)
            self._stale = True
            return False
        if written is None:
            return False
        self.observe(msgspec.json.decode(written, type=_Lease))
        self._renewed_at = began
        return True

    async def _write(self) -> bytes | None:
        if self._stale or not self.held:  # a leader knows the lease from its last write
            try:
                raw = await self._client.get(LEASES, self._namespace, self._name)
            except NotFoundError:
                return await self._create()
            self.observe(msgspec.json.decode(raw, type=_Lease))
            self._stale = False
        assert self._observed is not None, "observed above, or at the last renewal"
        spec_before = self._observed.spec
        if not self.may_take(spec_before):
            return None
        ours = spec_before.holder_identity == self._identity
        spec = LeaseSpec(
            self._identity,
            max(1, round(self._duration)),
            spec_before.acquire_time if ours else _now(),
            _now(),
            (spec_before.lease_transitions or 0) + (0 if ours else 1),
        )
        return await self._client.update(LEASES, self._namespace, self._name, self._body(self._observed, spec))

    async def _create(self) -> bytes | None:
        spec = LeaseSpec(self._identity, max(1, round(self._duration)), _now(), _now(), 0)
        try:
            return await self._client.create(LEASES, self._namespace, self._body(None, spec))
        except AlreadyExistsError:
            return None

    def _body(self, lease: _Lease | None, spec: LeaseSpec) -> dict[str, Any]:
        metadata = {"name": self._name, "namespace": self._namespace}
        if lease is not None:
            metadata["resourceVersion"] = lease.metadata.resource_version
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": {key: value for key, value in msgspec.to_builtins(spec).items() if value is not None},
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
