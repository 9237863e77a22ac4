"""The calls of one agent program: each becomes a turn of its sample.

A call continues the known conversation that its messages begin with: those of an earlier call and its answer. Then the
context of the turn is the context and the answer of that call, as token ids, and the tokens of the new messages, as the
chat template writes them after an answer. No text of the model that is known is ever encoded. If several conversations
fit, the longest counts. A call that begins with none (the first one, a rewritten history, a subagent) has all its
messages as context.

A call whose model is the name of a frozen pool is answered by that pool. It is no turn, and not trained.

A second call after one answer, and a second conversation, are branches of the sample, also while other calls are
answered. So what is trained is what the model saw, call by call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import blake3

from rljob.protocol.runner_protocol import PoolAnswer, TurnTokens
from rljob.runner.agents.chat_reply import Answer
from rljob.runner.agents.chat_request import CallMessage, ChatCall, rendered
from rljob.runner.agents.refused_call import RefusedCallError
from rljob.runner.chat import ChatTemplate
from rljob.runner.context import TrajectoryError
from rljob.runner.conversation import text_after_answer, tokens_after_answer
from rljob.runner.prompt_content import Messages
from rljob.runner.prompts import Encoder

REPEATED = "x-stainless-retry-count"
"""Header of OpenAI's clients: how often a request was sent before. Without it, equal requests are different calls."""


class Generator(Protocol):
    """Generates turns, as :class:`rljob.runner.context.Context` does."""

    @property
    def sample(self) -> str:
        """Id of the sample."""

    def branch(self) -> Generator:
        """Return a generator that continues from the present tokens."""

    async def generate(self, token_ids: bytes, max_tokens: int | None = None, stop: Sequence[str] = ()) -> TurnTokens:
        """Generate the next turn."""

    async def ask(
        self,
        pool: str,
        content: str | Messages,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
    ) -> PoolAnswer:
        """Ask a frozen pool."""

    def answer(self, turn: TurnTokens) -> str:
        """Return the text of an answer."""


@dataclass(eq=False)
class Answered:
    """A call with its answer: a conversation that later calls can continue."""

    messages: list[CallMessage]  # of the call, and its answer
    sequence: bytes  # int32: context and answer
    answer: bytes  # int32
    generator: Generator
    fork: Generator  # further continuations are branches of it
    continued: bool = False

    def begins(self, messages: Sequence[CallMessage]) -> bool:
        """Return whether messages begin with those of this conversation. The last of them is not the assistant's, so it
        is new."""
        known = self.messages
        return len(known) < len(messages) and all(map(CallMessage.same, known, messages))

    def next(self) -> Generator:
        """Return the generator of a call that continues this one."""
        if self.continued:
            return self.fork.branch()
        self.continued = True
        return self.generator


class AgentSession:
    """The conversations of a program with the model.

    Args:
        generator: the trajectory.
        chat: the policy's chat template.
        encoder: the policy's tokenizer.
        stop_token_ids: tokens that end an answer.
        max_model_length: tokens of the longest sequence that an engine accepts.
        first: receives text and token ids (int32 bytes) of the first context.
        pools: names of the frozen pools.
    """

    def __init__(
        self,
        generator: Generator,
        chat: ChatTemplate,
        encoder: Encoder,
        stop_token_ids: Sequence[int],
        max_model_length: int,
        first: Callable[[str, bytes], None],
        pools: Collection[str] = (),
    ) -> None:
        self.pools = pools
        self._generator = generator
        self._chat = chat
        self._encoder = encoder
        self._stop = frozenset(stop_token_ids)
        self._max_model_length = max_model_length
        self._first = first
        self._answered: list[Answered] = []
        self._begin = Answered([], b"", b"", generator, generator.branch())
        self._calls: dict[bytes, asyncio.Task[Answer]] = {}  # digest of the body → the newest call with it
        self._answering: set[asyncio.Task[Answer]] = set()  # calls in progress
        self.turns = 0
        self.forks = 0  # calls that began a branch
        self.completion = ""  # the last answer
        self.last = generator  # of the last answer
        self.finish = ""
        self.context_limit = False
        self.failure = ""  # reason of the failed sample
        self.failed = asyncio.Event()

    async def complete(self, call: ChatCall, body: bytes, repeated: bool) -> Answer:
        """Return the answer to a call. A repeated one gets the answer of the first, also while it is generated.

        Args:
            call: the request.
            body: as received.
            repeated: whether the client says that it sent the request before.

        Raises:
            RefusedCallError: the call is refused.
        """
        digest = blake3.blake3(body).digest()
        answering = self._calls.get(digest) if repeated else None
        if answering is None:
            if self.failure:
                raise RefusedCallError(self.failure)
            answering = self._calls[digest] = asyncio.create_task(self._answer(call))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
        try:
            return await asyncio.shield(answering)  # a client that disconnects does not end the turn
        except asyncio.CancelledError:
            if answering.cancelled():
                raise RefusedCallError(
                    "the sample of this agent has ended", status=401, code="invalid_api_key"
                ) from None
            raise

    def close(self) -> None:
        """End the calls in progress."""
        for answering in self._answering:
            answering.cancel()

    async def _ask_pool(self, call: ChatCall) -> Answer:
        sampling = (call.max_tokens, call.temperature, call.top_p, call.stop)
        try:
            answer = await self._generator.ask(call.model, rendered(call.messages), *sampling)
        except TrajectoryError as error:  # the program may go on without it
            raise RefusedCallError(str(error), param="model") from error
        return Answer(f"chatcmpl-{self._generator.sample}-{call.model}", answer.text, answer.finish, 0, 0)

    async def _answer(self, call: ChatCall) -> Answer:
        if call.model in self.pools:
            return await self._ask_pool(call)
        before = max((one for one in self._answered if one.begins(call.messages)), default=self._begin, key=_preference)
        context = self._context(call, before)
        if len(context) // 4 >= self._max_model_length:
            self.context_limit = True
            return self._limited(len(context) // 4)
        self.turns += 1
        self.forks += before.continued
        generator = before.next()
        try:
            turn = await generator.generate(context, call.max_tokens, call.stop)
            fork = generator.branch()
        except TrajectoryError as error:
            raise self._fail(str(error)) from error
        self.completion, self.finish, self.last = generator.answer(turn), turn.finish, generator
        messages = [*call.messages, CallMessage("assistant", self.completion)]
        self._answered.append(Answered(messages, context + turn.token_ids, turn.token_ids, generator, fork))
        branch = f"{turn.branch}-" if turn.branch else ""
        name = f"chatcmpl-{self._generator.sample}-{branch}{turn.turn}"
        return Answer(name, self.completion, self.finish, len(context) // 4, len(turn.token_ids) // 4)

    def _context(self, call: ChatCall, before: Answered) -> bytes:
        """Return the token ids (int32 bytes) of the context of a call that continues another one."""
        known = len(before.messages)
        try:
            if not known:
                text = self._chat.render(rendered(call.messages))
                context = self._encoder.encode(text, special=False)
                if not self.turns:
                    self._first(text, context)
                return context
            after = text_after_answer(self._chat, rendered(call.messages[: known - 1]), rendered(call.messages[known:]))
        except ValueError as error:  # of the chat template
            raise RefusedCallError(str(error), param="messages") from error
        return before.sequence + tokens_after_answer(self._encoder, self._stop, after, before.answer)

    def _fail(self, reason: str) -> RefusedCallError:
        """Fail the sample; return the reply to the call."""
        self.failure = reason
        self.failed.set()
        return RefusedCallError(reason, param="messages")

    def _limited(self, tokens: int) -> Answer:
        """Return the answer to a call whose context leaves no room for one. It is no turn."""
        return Answer(f"chatcmpl-{self._generator.sample}-limit", "", "length", tokens, 0)


def _preference(answered: Answered) -> tuple[int, bool]:
    """Return the sort key of conversations that a call may continue: of equal ones, one that no call has continued."""
    return len(answered.messages), not answered.continued
