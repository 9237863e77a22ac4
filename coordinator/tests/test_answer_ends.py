"""What engines need to know to end an answer where it ends without an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from world import int32, job

from rljob.protocol import agent_protocol as m
from rljob.protocol.contexts import context_digest
from rljob.protocol.shared_messages import VersionSpan


def interrupted(generate: m.Generate, tokens: list[int]) -> m.Completions:
    """Return the completion of a request that was aborted after ``tokens``."""
    count = len(tokens)
    spans = [VersionSpan(0, 0, count)]
    context = context_digest(generate.token_ids)
    completion = m.Completion(generate.request_id, int32(tokens), bytes(4 * count), spans, "abort", 0.1, context)
    return m.Completions([completion])


async def test_a_continued_turn_carries_the_tokens_of_its_answer_and_no_others(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=1, alpha=0, n=1, g=1), tmp_path)
    world.runner.turns_of = lambda sample: 2
    world.runner.stop, world.runner.min_tokens = ["xy"], 5
    await world.start()
    world.connect_all()
    (agent,) = world.agents
    agent.hold = True
    for turn in (0, 1):
        await world.settle()
        (first,) = agent.queue
        assert (first.request_id.turn, ends(first)) == (turn, (["xy"], 5, 0, 16))
        agent.queue.clear()
        agent.say(interrupted(first, [8, 9]))
        await world.settle()
        (second,) = agent.queue
        assert second.token_ids == first.token_ids + int32([8, 9])
        assert ends(second) == (["xy"], 5, 2, 14)
        world.kill_coordinator()
        agent.reborn()
        await world.start()
        world.connect_all()
        await world.settle()
        (again,) = agent.queue
        assert (again.token_ids, ends(again)) == (second.token_ids, ends(second))
        agent.hold = False
        await world.some(1)
        agent.hold = True
    await world.settle()
    assert world.run.finished
    world.check_accounts()


def ends(generate: m.Generate) -> tuple[list[str], int, int, int]:
    """Return where the answer ends: stop strings, minimum length, tokens so far, and how many may follow."""
    sampling = generate.sampling
    return sampling.stop, sampling.min_tokens, sampling.answered, sampling.max_tokens
