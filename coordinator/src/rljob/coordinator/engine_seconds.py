"""Where the time of engines goes: every second of an engine is generating, waiting, paused or dead.

An account belongs to one engine of a pool over all its servers: a server that registers takes the account of a server
of its pool that is gone, of the same name if there is one. An account begins when its first server registers, and from
then on its seconds add up to wall-clock time. It ends when its engine was removed on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import SILENT_SECONDS, EngineRecord

ENGINE_ACTIVITIES = ("generating", "waiting", "paused", "dead")
"""generating: it has requests. waiting: it could take requests, and has none. paused: it has no weights yet, or
receives weights. dead: its server starts or is gone, or its agent is silent or not connected."""
_UNDECIDED = "undecided"
"""It has requests during a weight update. How long it paused is known once its agent acknowledges the update."""


@dataclass(eq=False)
class EngineAccount:
    """The seconds of one engine. ``name``: POOL-NUMBER."""

    name: str
    pool: str
    begun: float
    since: float
    activity: str = "dead"
    user: str = ""  # name of the engine that has it, or had it last
    ended: bool = False
    update: int | None = None  # the running weight update
    holder: EngineRecord | None = None  # the registered server that has it
    connection: Connection | None = None  # of the agent of that, as of the last update
    undecided: list[tuple[float, float]] = field(default_factory=list)  # (begin, end), of the running update
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENGINE_ACTIVITIES, 0.0))

    def advance(self, now: float, activity: str) -> None:
        """Add the time until ``now`` to the activity so far, and continue with ``activity``."""
        if self.activity == _UNDECIDED:
            self.undecided.append((self.since, now))
        elif not self.ended:
            self.seconds[self.activity] += now - self.since
        self.since, self.activity = now, activity

    def decide(self, begin: float = -math.inf, end: float = math.inf) -> None:
        """Divide the undecided seconds: those between ``begin`` and ``end`` were paused, the others generating."""
        for first, last in self.undecided:
            paused = max(0.0, min(end, last) - max(begin, first))
            self.seconds["paused"] += paused
            self.seconds["generating"] += last - first - paused
        self.undecided.clear()


class EngineSeconds:
    """The accounts of all engines of a run since the start of this process.

    Args:
        clock: returns seconds; it stands still after the end of the run.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[EngineRecord, EngineAccount] = {}
        self._behind = 0.0  # time of the event loop minus that of the clock
        self._noted: dict[EngineRecord, None] = {}  # found silent since the last update
        self.accounts: list[EngineAccount] = []

    def update(self, changed: Iterable[EngineRecord], engines: Mapping[str, EngineRecord], now: float) -> None:
        """Record the state of the engines.

        Args:
            changed: the engines that have changed, were registered or were removed since the last update.
            engines: instance → engine, of all registered engines.
            now: time of the event loop.
        """
        at = self._clock()
        self._behind = now - at
        order = dict.fromkeys([*self._noted, *changed])
        self._noted.clear()
        for engine in [engine for engine in order if engines.get(engine.instance) is not engine]:
            del order[engine]
            self._lose(engine, at)
        for engine in order:
            account = self._held.get(engine)
            if account is None and engine.connection is not None:
                account = self._take(engine, at)
            if account is not None:
                if engine.connection is not account.connection:
                    self._end_if_silent(account, at)
                    account.connection = engine.connection
                activity = activity_of(engine, now)
                if activity != account.activity or engine.update != account.update:
                    self._follow(account, engine, at, activity)

    def _lose(self, engine: EngineRecord, at: float) -> None:
        lost = self._held.pop(engine, None)
        if lost is not None:
            self._end_if_silent(lost, at)
            lost.advance(at, "dead")
            lost.decide()
            lost.ended, lost.holder, lost.connection = engine.state == "leaving", None, None

    def _follow(self, account: EngineAccount, engine: EngineRecord, at: float, activity: str) -> None:
        other = engine.update != account.update
        self._end_if_silent(account, at)
        account.advance(at, activity)
        if other:  # an update that was acknowledged has nothing undecided
            account.decide()
            account.update = engine.update

    def _end_if_silent(self, account: EngineAccount, at: float) -> bool:
        """End the activity of an account whose agent is silent, at the time from which it counts as dead. Return
        whether it ended. Silence begins without an event."""
        if account.connection is None or account.activity == "dead" or account.ended:
            return False
        begin = account.connection.heard + SILENT_SECONDS - self._behind
        if begin >= at:
            return False
        account.advance(max(account.since, begin), "dead")
        return True

    def acknowledged(self, engine: EngineRecord, pause: float, since_resume: float) -> None:
        """Divide the seconds of the engine's update into pause and generation, as its agent has just reported them.

        Args:
            engine: the registered engine.
            pause: seconds from the beginning of the pause to the end of the resume.
            since_resume: seconds since then.
        """
        account, at = self._held.get(engine), self._clock()
        if account is not None:
            account.advance(at, account.activity)
            account.decide(at - since_resume - pause, at - since_resume)

    def _take(self, engine: EngineRecord, at: float) -> EngineAccount:
        """Return the account of an engine that has just registered. It may be that of a server that is not connected:
        if that one connects again, it takes another account."""
        of_pool = [account for account in self.accounts if account.pool == engine.pool]
        free = [account for account in of_pool if not account.ended and not _is_connected(account.holder)]
        account = next((each for each in free if each.user == engine.name), free[0] if free else None)
        if account is None:
            account = EngineAccount(f"{engine.pool}-{len(of_pool)}", engine.pool, at, at)
            self.accounts.append(account)
        elif account.holder is not None:
            del self._held[account.holder]
        self._end_if_silent(account, at)
        account.advance(at, account.activity)
        account.decide()
        account.update = None
        account.user, account.holder, account.connection = engine.name, engine, engine.connection
        self._held[engine] = account
        return account

    def of(self, engine: EngineRecord) -> dict[str, float]:
        """Return activity → seconds of a registered engine and the servers before it; empty: it has no account."""
        account = self._held.get(engine)
        return {} if account is None else self.seconds([account])

    def seconds(self, accounts: Iterable[EngineAccount] | None = None) -> dict[str, float]:
        """Return activity → seconds of some accounts until now; by default of all. Until an update is acknowledged, its
        seconds with requests are paused."""
        accounts = self.accounts if accounts is None else list(accounts)
        sums, at = self.decided_seconds(accounts), self._clock()
        for account in accounts:
            sums["paused"] += sum(end - begin for begin, end in account.undecided)
            if account.activity == _UNDECIDED:
                sums["paused"] += at - account.since
        return sums

    def decided_seconds(self, accounts: Iterable[EngineAccount] | None = None) -> dict[str, float]:
        """Return the same without the seconds with requests of updates that are not acknowledged: these numbers never
        decrease."""
        at, sums = self._clock(), dict.fromkeys(ENGINE_ACTIVITIES, 0.0)
        for account in self.accounts if accounts is None else accounts:
            if self._end_if_silent(account, at) and account.holder is not None:
                self._noted[account.holder] = None
            for activity, spent in account.seconds.items():
                sums[activity] += spent
            if not account.ended and account.activity != _UNDECIDED:
                sums[account.activity] += at - account.since
        return sums


def _is_connected(holder: EngineRecord | None) -> bool:
    return holder is not None and holder.connection is not None


def activity_of(engine: EngineRecord, now: float) -> str:
    """Return what a registered engine does; ``now``: time of the event loop."""
    connection = engine.connection
    if connection is None or engine.state == "starting" or now - connection.heard > SILENT_SECONDS:
        return "dead"
    if engine.update is None and engine.serving is not None:
        return "generating" if engine.requests else "waiting"
    if engine.update is not None and engine.requests:  # with its acknowledgement it has resumed
        return _UNDECIDED if engine.ack is None else "generating"
    return "paused"
