"""Requests for tokens, and the engines that hold them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import msgspec

RequestKey = tuple[str, int, int, str]
"""(sample, turn, attempt)."""

RequestKind = tuple[int | None, int]
"""(pinned version, minimum model length): requests of one kind have the same eligible engines."""


@dataclass(eq=False)
class SharedPrefix:
    """The requests of one group. ``home``: the engine that got the last one; None: none was sent. ``members``: those
    that wait and are the first of their sample, by kind."""

    home: EngineLoad | None = None
    members: dict[RequestKind, dict[RequestKey, Request]] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        """Add a request that waits."""
        if request.previous is None:
            self.members.setdefault(request.kind, {})[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        if request.previous is None:
            del self.members[request.kind][request.key]


class Request(msgspec.Struct, eq=False):
    """A request for the tokens of one turn.

    ``order``: lower values are sent first. ``version``: the policy version that the engine must serve (evaluation);
    None: the current version. ``min_model_length``: the engine must support sequences of this many tokens.
    ``previous``: the engine that got the previous request of the sample; None if this is the first. ``prefix_tokens``:
    those of ``tokens`` that its home has. ``kind``: the attributes that decide which engines are eligible; derived.
    """

    key: RequestKey
    prefix: SharedPrefix
    order: tuple[int, int, int]
    tokens: int  # prompt plus maximum response
    version: int | None = None
    min_model_length: int = 0
    previous: EngineLoad | None = None
    prefix_tokens: int = 0
    engine: EngineLoad | None = None  # the engine that holds the request
    queued: bool = False
    kind: RequestKind = (None, 0)

    def __post_init__(self) -> None:
        self.kind = (self.version, self.min_model_length)

    @property
    def home(self) -> EngineLoad | None:
        """The engine that has the prefix; None: the request starts its group."""
        return self.previous or self.prefix.home


@dataclass(eq=False)
class EngineLoad:
    """The requests of one engine. An engine holds somewhat more requests than it runs concurrently, so that it never
    waits for a network round trip. ``watchers``: an engine that changes adds itself to each of them."""

    instance: str
    max_concurrency: int
    max_model_length: int  # tokens
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    tokens: int = 0
    capacity: int = field(init=False)  # requests that the engine runs or holds
    watchers: list[dict[Any, None]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.capacity = self.max_concurrency + max(4, self.max_concurrency // 4)

    @property
    def present(self) -> bool:
        """Whether its free slots count."""
        return True

    @property
    def ability(self) -> Hashable:
        """What decides which kinds of requests the engine may run; None: none at all."""
        return self.max_model_length

    def watch(self, changed: dict[Any, None]) -> None:
        """Have the engine added to ``changed`` now, and when it changes."""
        self.watchers.append(changed)
        changed[self] = None

    def unwatch(self, changed: dict[Any, None]) -> None:
        """Have the engine added to ``changed`` for the last time, now."""
        self.watchers = [watcher for watcher in self.watchers if watcher is not changed]
        changed[self] = None

    def touch(self) -> None:
        """Note for the watchers that the engine has changed."""
        for watcher in self.watchers:
            watcher[self] = None

    @property
    def free_slots(self) -> int:
        """How many more requests the engine accepts now, to run or to hold."""
        return self.capacity - len(self.requests)

    @property
    def busy(self) -> bool:
        """Whether all slots are taken: the engine holds further requests until one is free."""
        return len(self.requests) >= self.max_concurrency

    @property
    def tokens_per_slot(self) -> float:
        """Outstanding tokens per slot."""
        return self.tokens / self.max_concurrency

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Sort key: the engine that is served first is the lowest."""
        return (self.busy, self.tokens_per_slot, self.instance)

    def add(self, request: Request) -> None:
        """Assign a request to the engine."""
        self.requests[request.key] = request
        self.tokens += request.tokens
        request.engine = self
        self.touch()

    def remove(self, key: RequestKey) -> Request | None:
        """Remove and return a request; None if the engine does not hold it."""
        request = self.requests.pop(key, None)
        if request is not None:
            self.tokens -= request.tokens
            request.engine = None
            self.touch()
        return request
