"""A fake rollout agent: implements the agent's protocol and generates tokens with e2e.fakes.tokens.

Its weights are a digest that the fake trainer puts into the name of the weight group. One iteration of its loop
generates one token of every running sequence; with ``seconds_per_token`` 0 it never sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import uuid
from array import array
from dataclasses import dataclass, field

from e2e.fakes.model import tokenizer
from e2e.fakes.tokens import Stream, begin, weights_key
from rljob.protocol import agent_protocol as m
from rljob.protocol.contexts import KeptContexts
from rljob.protocol.coordinator_link import CoordinatorLink
from rljob.protocol.environment import read_environment
from rljob.protocol.heartbeat import beating
from rljob.protocol.known_tensors import KnownTensors
from rljob.protocol.shared_messages import VersionSpan
from rljob.rollout.answer_end import AnswerEnd

log = logging.getLogger(__name__)

Key = tuple[str, int, int, str]
HEARTBEAT_SECONDS = 5.0
KEPT_BYTES = 16 << 20


@dataclass
class Faults:
    """Injected faults. ``weights``: the fault of the next ``weights_times`` weight updates: refuse | wrong_digest |
    silent. ``die_after_tokens``: the process is killed with SIGKILL after this number of tokens."""

    weights: str = ""
    weights_times: int = 1
    die_after_tokens: int | None = None


@dataclass
class Running:
    """A request in progress."""

    request: m.Generate  # with all its tokens
    stream: Stream
    end: AnswerEnd
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def request_id(self) -> m.RequestId:
        """Id of the request."""
        return self.request.request_id


class FakeEngine:
    """One agent with its engine.

    Args:
        url: address of the coordinator.
        token: the agents' token.
        pool: its rollout pool.
        max_concurrency: sequences generated concurrently.
        seconds_per_token: see the module docstring.
        faults: injected faults.
        pod: name of its pod.
    """

    def __init__(
        self,
        url: str,
        token: str,
        pool: str = "main",
        max_concurrency: int = 64,
        seconds_per_token: float = 0.0,
        faults: Faults | None = None,
        pod: str = "",
    ) -> None:
        self.instance = f"fake-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.faults = faults or Faults()
        self.lineage = self.version = -1
        self.digest = ""
        self.tokens_written = 0
        self._pool = pool
        self._pod = pod
        self._max_concurrency = max_concurrency
        self._seconds_per_token = seconds_per_token
        self._weights = 0
        self._waiting: dict[Key, Running] = {}
        self._running: dict[Key, Running] = {}
        self._unacknowledged: dict[Key, m.Completion] = {}
        self._contexts = KeptContexts(KEPT_BYTES)
        self._updates: list[m.PrepareWeights] = []
        self._tensors = KnownTensors()
        self._busy = asyncio.Event()
        self._link = CoordinatorLink(url, "agent", token, m.ToAgent, self._register)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RefusedError: the coordinator rejects this agent permanently.
        """
        others = [asyncio.create_task(self._write()), asyncio.create_task(self._beat())]
        try:
            async for message in self._link.messages():
                match message:
                    case m.Generate(request_id=request_id):
                        self._generate(message)
                    case m.Abort(request_ids=request_ids, discard=discard):
                        for request_id in request_ids:
                            self._abort(_key(request_id), discard)
                    case m.Forget(contexts=names):
                        self._contexts.forget(names)
                    case m.AckCompletions(request_ids=request_ids):
                        for request_id in request_ids:
                            self._unacknowledged.pop(_key(request_id), None)
                    case m.PrepareWeights():
                        self._prepare(message)
                    case m.RestartEngine():
                        self._restart()
        finally:
            for task in others:
                task.cancel()

    def _register(self) -> list[object]:
        held = [running.request_id for running in (*self._running.values(), *self._waiting.values())]
        registration = m.RegisterEngine(
            self.instance,
            self._pool,
            self._max_concurrency,
            4096,
            self.lineage,
            self.version,
            held,
            self.digest,
            self._pod,
        )
        return [registration, *([m.Completions(list(self._unacknowledged.values()))] if self._unacknowledged else [])]

    # --- requests ---

    def _generate(self, request: m.Generate) -> None:
        key = _key(request.request_id)
        if key in self._unacknowledged:
            self._link.send(m.Completions([self._unacknowledged[key]]))
        elif key not in self._running and key not in self._waiting:
            sampling = request.sampling
            seed = sampling.seed if sampling.temperature > 0 else 0
            whole = self._contexts.whole(request)
            if whole is None:
                self._link.send(m.PrefixMissing(request.request_id))
                return
            stream = begin(whole.token_ids, seed, sampling.max_tokens, sampling.stop_token_ids)
            end = AnswerEnd(sampling, array("i", whole.token_ids), tokenizer)
            self._waiting[key] = Running(whole, stream, end)
            self._busy.set()

    def _abort(self, key: Key, discard: bool) -> None:
        running = self._running.pop(key, None) or self._waiting.pop(key, None)
        if running is not None and not discard:
            self._complete([(running, "abort")])
        elif discard:
            self._unacknowledged.pop(key, None)

    def _complete(self, finished: list[tuple[Running, str]]) -> None:
        completions = [
            m.Completion(
                request_id=running.request_id,
                token_ids=running.stream.token_ids.tobytes(),
                logprobs=running.stream.logprobs.tobytes(),
                spans=running.spans,
                finish=finish,
                seconds=0.0,
                context=running.request.context,
            )
            for running, finish in finished
        ]
        for running, _ in finished:
            context = running.request.token_ids + running.stream.token_ids.tobytes()
            self._contexts.keep(running.request_id, context)
        self._unacknowledged |= {_key(completion.request_id): completion for completion in completions}
        self._link.send(m.Completions(completions))

    async def _write(self) -> None:
        """Generate one token of every running sequence per iteration, forever."""
        while True:
            await asyncio.sleep(self._seconds_per_token)
            while self._waiting and len(self._running) < self._max_concurrency:
                key = next(iter(self._waiting))
                self._running[key] = self._waiting.pop(key)
            finished = [(running, finish) for running in self._running.values() if (finish := self._step(running))]
            for running, _ in finished:
                del self._running[_key(running.request_id)]
            if finished:
                self._complete(finished)
            self._update_when_due()
            if not self._running and not self._waiting:
                self._busy.clear()
                await self._busy.wait()

    def _step(self, running: Running) -> str:
        running.stream.step(self._weights)
        end = len(running.stream.token_ids)
        finish = "length" if end >= running.stream.max_tokens else ""
        if running.end.is_at(running.stream.token_ids[-1]):
            finish = "stop"
        if running.spans and running.spans[-1].version == self.version:
            running.spans[-1].end = end
        else:
            running.spans.append(VersionSpan(self.version, end - 1, end))
        self.tokens_written += 1
        if self.faults.die_after_tokens is not None and self.tokens_written >= self.faults.die_after_tokens:
            log.warning("exiting after %d tokens (--die-after-tokens)", self.tokens_written)
            os._exit(137)
        return finish

    # --- weights ---

    def _prepare(self, update: m.PrepareWeights) -> None:
        parameters = self._tensors.of(update.tensors, update.parameters)
        assert parameters is not None, "the list of tensors was sent before"
        update.parameters = parameters
        if self.faults.weights and self.faults.weights_times > 0:
            self.faults.weights_times -= 1
            if self.faults.weights == "refuse":
                self._link.send(m.WeightFailed(update.update, "refused (injected fault)"))
            elif self.faults.weights == "wrong_digest":
                self._link.send(m.WeightAck(update.update, update.lineage, update.version, "0" * 64, *[0.0] * 5))
            return
        self._updates.append(update)
        if update.in_flight == "abort":
            aborted = [*self._running.values(), *self._waiting.values()]
            self._running.clear()
            self._waiting.clear()
            if aborted:
                self._complete([(running, "abort") for running in aborted])
        self._update_when_due()

    def _update_when_due(self) -> None:
        """Apply the newest weights; with inFlight `wait` only while no request runs."""
        if not self._updates or (self._updates[-1].in_flight == "wait" and (self._running or self._waiting)):
            return
        update = self._updates[-1]
        self._updates.clear()
        self.lineage, self.version = update.lineage, update.version
        self.digest = digest_of_group(update.group)
        self._weights = weights_key(self.digest)
        log.info("applied version %d.", self.version)
        self._link.send(m.WeightAck(update.update, update.lineage, update.version, self.digest, *[0.0] * 5))

    def _restart(self) -> None:
        """Start as a new instance without weights, as after a restart of the engine server."""
        self.instance = f"fake-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.lineage = self.version = -1
        self.digest = ""
        self._running.clear()
        self._waiting.clear()
        self._contexts.clear()
        for message in self._register():
            self._link.send(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._link.send(m.EngineHeartbeat("ready", len(self._running), len(self._waiting), 0))


def group_name(digest: str) -> str:
    """Return a weight group's name that carries the weights."""
    return f"fake:{uuid.uuid4().hex[:8]}:{digest}"


def digest_of_group(group: str) -> str:
    """Return the weights that a group's name carries."""
    return group.rpartition(":")[2]


def _key(request_id: m.RequestId) -> Key:
    return request_id.key


def main() -> None:
    """Run one agent as a process, with the environment of a component."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--max-concurrency", type=int, default=64)
    parser.add_argument("--die-after-tokens", type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    environment = read_environment()

    async def run() -> None:
        engine = FakeEngine(
            environment.coordinator,
            environment.token,
            environment.name,
            options.max_concurrency,
            options.seconds_per_token,
            Faults(die_after_tokens=options.die_after_tokens),
        )
        with beating():
            await engine.run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
