"""The calls of one agent program: each becomes a turn of its sample.

The messages of a call must begin with those of the call before and its answer. Then the context of the turn is the
context and the answer of the turn before, as token ids, and the tokens of the new messages, as the chat template writes
them after an answer. No text of the model is ever encoded. A call that does not continue the one before (a rewritten
history, a second conversation, a call beside another one) has no place in a sample, which is one sequence of tokens:
it fails the sample, so that nothing else than what the program saw is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import blake3

from rljob.protocol.messages import TurnTokens
from rljob.runner.agents.chat_reply import Answer
from rljob.runner.agents.chat_request import CallMessage, ChatCall, rendered
from rljob.runner.agents.refused_call import RefusedCallError
from rljob.runner.chat import ChatTemplate
from rljob.runner.context import TrajectoryError
from rljob.runner.conversation import text_after_answer, tokens_after_answer
from rljob.runner.prompts import Encoder

REPEATED = "x-stainless-retry-count"
"""Header of OpenAI's clients: how often a request was sent before. Without it, equal requests are different calls."""


class Generator(Protocol):
    """Generates turns, as :class:`rljob.runner.context.Context` does."""

    @property
    def sample(self) -> str:
        """Id of the sample."""

    async def generate(self, token_ids: bytes, max_tokens: int | None = None, stop: Sequence[str] = ()) -> TurnTokens:
        """Generate the next turn."""

    def answer(self, turn: TurnTokens) -> str:
        """Return the text of an answer."""


class AgentSession:
    """One conversation of a program with the model.

    Args:
        generator: the trajectory.
        chat: the policy's chat template.
        encoder: the policy's tokenizer.
        stop_token_ids: tokens that end an answer.
        max_model_length: tokens of the longest sequence that an engine accepts.
        first: receives text and token ids (int32 bytes) of the first context.
    """

    def __init__(
        self,
        generator: Generator,
        chat: ChatTemplate,
        encoder: Encoder,
        stop_token_ids: Sequence[int],
        max_model_length: int,
        first: Callable[[str, bytes], None],
    ) -> None:
        self._generator = generator
        self._chat = chat
        self._encoder = encoder
        self._stop = frozenset(stop_token_ids)
        self._max_model_length = max_model_length
        self._first = first
        self._messages: list[CallMessage] = []  # of the last turn, with its answer
        self._sequence = b""  # int32: context and answer of the last turn
        self._last: TurnTokens | None = None
        self._body = b""  # digest of the last call
        self._call: asyncio.Task[Answer] | None = None
        self.turns = 0
        self.completion = ""  # the last answer
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
        if not (repeated and self._call is not None and digest == self._body):
            if self.failure:
                raise RefusedCallError(self.failure)
            if self._call is not None and not self._call.done():
                raise self._fork(f"call {self.turns + 1} was made before the answer of call {self.turns}")
            self._body, self._call = digest, asyncio.create_task(self._answer(call))
        try:
            return await asyncio.shield(self._call)  # a client that disconnects does not end the turn
        except asyncio.CancelledError:
            if self._call.cancelled():
                raise RefusedCallError(
                    "the sample of this agent has ended", status=401, code="invalid_api_key"
                ) from None
            raise

    def close(self) -> None:
        """End the call in progress."""
        if self._call is not None and not self._call.done():
            self._call.cancel()

    async def _answer(self, call: ChatCall) -> Answer:
        context = self._context(call)
        if len(context) // 4 >= self._max_model_length:
            self.context_limit = True
            return self._limited(len(context) // 4)
        self.turns += 1
        try:
            turn = await self._generator.generate(context, call.max_tokens, call.stop)
        except TrajectoryError as error:
            raise self._fail(str(error)) from error
        self._last, self._sequence = turn, context + turn.token_ids
        self.completion, self.finish = self._generator.answer(turn), turn.finish
        self._messages = [*call.messages, CallMessage("assistant", self.completion)]
        name = f"chatcmpl-{self._generator.sample}-{turn.turn}"
        return Answer(name, self.completion, self.finish, len(context) // 4, len(turn.token_ids) // 4)

    def _context(self, call: ChatCall) -> bytes:
        """Return the token ids (int32 bytes) of the context of a call."""
        try:
            if self._last is None:
                text = self._chat.render(rendered(call.messages))
                context = self._encoder.encode(text, special=False)
                self._first(text, context)
                return context
            known = len(self._messages)
            self._check_continued(call.messages)
            after = text_after_answer(self._chat, rendered(call.messages[: known - 1]), rendered(call.messages[known:]))
        except ValueError as error:  # of the chat template
            raise RefusedCallError(str(error), param="messages") from error
        answered = self._last.token_ids
        return self._sequence + tokens_after_answer(self._encoder, self._stop, after, answered)

    def _check_continued(self, messages: list[CallMessage]) -> None:
        """Check that messages continue those of the last turn. The last of them is not the assistant's, so it is new.

        Raises:
            RefusedCallError: they do not; the sample has failed.
        """
        for i, known in enumerate(self._messages):
            if i >= len(messages) or not known.same(messages[i]):
                what = "is missing" if i >= len(messages) else "differs"
                raise self._fork(
                    f"call {self.turns + 1} does not continue call {self.turns} and its answer: message {i} {what}"
                )

    def _fork(self, cause: str) -> RefusedCallError:
        return self._fail(f"{cause}; a sample is one conversation: append messages to it, one call at a time")

    def _fail(self, reason: str) -> RefusedCallError:
        """Fail the sample; return the reply to the call."""
        self.failure = reason
        self.failed.set()
        return RefusedCallError(reason, param="messages")

    def _limited(self, tokens: int) -> Answer:
        """Return the answer to a call whose context leaves no room for one. It is no turn."""
        return Answer(f"chatcmpl-{self._generator.sample}-limit", "", "length", tokens, 0)
