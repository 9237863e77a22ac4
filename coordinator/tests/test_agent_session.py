"""Contexts of an agent's calls, for random conversations, tokenizers and templates."""

import asyncio
import tempfile
from array import array
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob.protocol.runner_protocol import TurnTokens
from rljob.runner.agents.agent_session import AgentSession
from rljob.runner.agents.chat_request import CallMessage, ChatCall
from rljob.runner.agents.refused_call import RefusedCallError
from rljob.runner.chat import ChatTemplate
from rljob.runner.context import TrajectoryError

END = ord("\x00")
TEMPLATES = [
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}<assistant>",
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<end>{% endfor %}a:",
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<end>{% else %}"
    "[{{ m['content'] | trim }}]{% endif %}{% endfor %}",
    # as Qwen3's: what the model thought is removed from all answers but the last one
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('#')[-1] }}{% else %}{{ m['content'] }}{% endif %}<end>{% endfor %}<assistant>",
]


class Pairs:
    """A tokenizer that merges the pairs ``aa`` and ``]a``, also over the end of an answer; <end> is the stop token."""

    merges = MappingProxyType({"aa": 1000, "]a": 1001})

    def encode(self, text: str, special: bool = True) -> bytes:
        text, ids, i = text.replace("<end>", "\x00"), [], 0
        while i < len(text):
            merged = self.merges.get(text[i : i + 2])
            ids.append(ord(text[i]) if merged is None else merged)
            i += 1 if merged is None else 2
        return array("i", ids).tobytes()

    def decode(self, token_ids: bytes) -> str:
        pairs = {number: pair for pair, number in self.merges.items()}
        return "".join(pairs.get(token) or chr(token) for token in array("i", token_ids)).replace("\x00", "")


class Engine:
    """Answers with given token ids; never with those of an encoded text."""

    sample = "g0.0"

    def __init__(self, answers) -> None:
        self.answers, self.contexts = list(answers), []

    def branch(self):
        return self

    async def generate(self, token_ids, max_tokens=None, stop=()):
        answer = self.answers.pop(0)
        finish = "stop" if answer[-1:] == [END] else "length"
        self.contexts.append(token_ids)
        return TurnTokens(len(self.contexts) - 1, b"", array("i", answer).tobytes(), finish)

    def answer(self, turn):
        return Pairs().decode(turn.token_ids)


def templates():
    for source in TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "chat_template.jinja").write_text(source)
            yield ChatTemplate(Path(folder))


CHATS = list(templates())
words = st.text("ab#] <>", max_size=4)
messages = st.builds(CallMessage, st.sampled_from(["user", "system"]), words)
answers = st.tuples(st.lists(st.sampled_from([*map(ord, "ab#] "), 1000, 1001]), max_size=4), st.booleans()).map(
    lambda drawn: drawn[0] + [END] * drawn[1]
)


@given(
    st.sampled_from(range(len(CHATS))),
    st.lists(st.tuples(st.lists(messages, min_size=1, max_size=2), answers), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_each_context_is_the_one_before_its_answer_and_new_tokens(template, rounds):
    chat, codec, engine = CHATS[template], Pairs(), Engine(answer for _, answer in rounds)
    session = AgentSession(engine, chat, codec, [END], 10_000, lambda text, token_ids: None)
    history = []

    async def call():
        for given_messages, _ in rounds:
            history.extend(given_messages)
            reply = await session.complete(ChatCall(list(history), None, [], False, False, "m"), b"", False)
            history.append(CallMessage("assistant", reply.text.strip()))  # as harnesses do

    asyncio.run(call())
    before = b""
    for number, (context, (new, answer)) in enumerate(zip(engine.contexts, rounds, strict=True)):
        assert context.startswith(before)
        added = codec.decode(context[len(before) :])
        position = -1
        for message in new:  # in order, and not lost
            position = added.find(message.text.strip(), position + 1)
            assert position >= 0
        ended = array("i", context[: len(before) + 4])
        if number and "<end>" in TEMPLATES[template]:
            assert END in ended[-2:], "the end of an answer is there once, also if it was cut"
            assert list(ended[-2:]) != [END, END]
        before = context + array("i", answer).tobytes()


@pytest.mark.parametrize("template", range(2))
@given(st.lists(st.tuples(messages, st.text("bc ", max_size=4)), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_for_answers_that_the_template_writes_the_same_way_it_gives_the_same_tokens(template, rounds):
    chat, codec = CHATS[template], Pairs()
    engine = Engine([*map(ord, answer), END] for _, answer in rounds)
    session = AgentSession(engine, chat, codec, [END], 10_000, lambda text, token_ids: None)
    history = []

    async def call():
        for message, _ in rounds:
            history.append(message)
            rendered = chat.render([{"role": each.role, "content": each.text} for each in history])
            reply = await session.complete(ChatCall(list(history), None, [], False, False, "m"), b"", False)
            assert engine.contexts[-1] == codec.encode(rendered)
            history.append(CallMessage("assistant", reply.text))

    asyncio.run(call())


async def test_a_template_that_refuses_the_messages_refuses_the_call_and_not_the_sample():
    with tempfile.TemporaryDirectory() as folder:
        source = "{% if messages | length == 3 %}{{ raise_exception('roles must alternate') }}{% endif %}"
        (Path(folder) / "chat_template.jinja").write_text(source + TEMPLATES[0])
        chat = ChatTemplate(Path(folder))
    session = AgentSession(Engine([[END], [END]]), chat, Pairs(), [END], 100, lambda text, token_ids: None)
    history = [CallMessage("user", "a")]
    reply = await session.complete(ChatCall(list(history), None, [], False, False, "m"), b"", False)
    history += [CallMessage("assistant", reply.text), CallMessage("user", "b")]
    with pytest.raises(RefusedCallError, match="refuses the messages: roles must alternate"):
        await session.complete(ChatCall(list(history), None, [], False, False, "m"), b"", False)
    history.append(CallMessage("user", "c"))
    await session.complete(ChatCall(list(history), None, [], False, False, "m"), b"", False)
    assert (session.failure, session.turns) == ("", 2)


async def test_after_a_call_that_the_trajectory_cannot_hold_all_calls_are_refused():
    class Full(Engine):
        async def generate(self, token_ids, max_tokens=None, stop=()):
            raise TrajectoryError("the sequence is full")

    session = AgentSession(Full([]), CHATS[0], Pairs(), [END], 100, lambda text, token_ids: None)
    for text in ("a", "b"):
        with pytest.raises(RefusedCallError, match="the sequence is full"):
            await session.complete(ChatCall([CallMessage("user", text)], None, [], False, False, "m"), b"", False)
    assert session.failed.is_set() and session.turns == 1
