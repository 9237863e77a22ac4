"""Baselines of the scheduling benchmark: other policies in the production coordinator, and loops of agents."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from rljob.coordinator.engines import EngineRecord
from rljob.coordinator.run import Run
from rljob.protocol.score_messages import Score
from rljob.runner.context import Context
from rljob.runner.loops import Loop
from rljob.scheduling.dispatch import RequestQueue
from rljob.scheduling.engine_ranks import EngineRanks
from rljob.scheduling.request import Request, RequestKind
from rljob.scheduling.scheduler import Scheduler


class WholeBatches(Scheduler):
    """Starts a batch of new groups at a time, and the next ones only when all of them are scored."""

    def admissible(self) -> int:
        """Return how many groups may start now."""
        batch = self.settings.groups_per_batch
        complete = [group.complete for group in self.groups.values()]
        return batch if all(complete) and len(complete) < batch else 0


def use_whole_batches(run: Run) -> None:
    """Replace the scheduler of a run."""
    run.scheduler = WholeBatches(run.scheduler.settings, run.scheduler.mixture)


class GroupsOnOneEngine(RequestQueue[EngineRecord]):
    """Sends all requests of a group to one engine: of those with the fewest groups, the first."""

    def __init__(self, engines: EngineRanks[EngineRecord]) -> None:
        super().__init__(engines)
        self._waiting: list[Request] = []
        self._groups: Counter[str] = Counter()  # engine → groups

    def put(self, request: Request) -> None:
        """Add a request."""
        super().put(request)
        self._waiting.append(request)

    def assign(
        self, eligible: Callable[[EngineRecord, RequestKind], bool], start_groups: bool = True
    ) -> Iterator[tuple[Request, EngineRecord]]:
        """Yield (request, engine) for each assignment."""
        self.engines.refresh()
        by_name = {engine.instance: engine for engine in self.engines.available()}
        waiting, self._waiting = sorted(self._waiting, key=lambda request: request.order), []
        for request in waiting:
            able = [name for name, engine in by_name.items() if eligible(engine, request.kind)]
            if not able:
                self._waiting.append(request)
            elif request.queued:
                if request.prefix.home is None:
                    name = min(able, key=lambda name: (self._groups[name], name))
                    self._groups[name] += 1
                    request.prefix.home = by_name[name]
                engine = self.engines.member(request.prefix.home)
                assert engine is not None
                engine.add(request)
                self.cancel(request)
                yield request, engine


def use_groups_on_one_engine(run: Run) -> None:
    """Replace the queue of a run."""
    run.trajectories.queue = GroupsOnOneEngine(run.engines.ranks)


def environment_loop(turns: int, seconds: Callable[[str, int], float], together: int = 0) -> Loop:
    """Return a loop that alternates between the model and an environment.

    Args:
        turns: of a trajectory.
        seconds: returns the latency of the environment after a turn of a sample.
        together: number of trajectories that wait for each other after every turn; 0: no barrier.
    """
    barrier = asyncio.Barrier(together) if together else None

    async def loop(context: Context) -> Score:
        tokens = context.prompt.token_ids
        for number in range(turns):
            turn = await context.generate(tokens)
            await asyncio.sleep(seconds(context.sample, number))
            if barrier is not None:
                await barrier.wait()
            tokens += turn.token_ids
        return await context.score("", "stop")

    return loop
