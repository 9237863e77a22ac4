"""What the quickstart's model is taught before reinforcement learning: problems and right answers, as text.

No answer is wrong. The first lesson shows the working, step by step. In the second most answers are bare results: the
model picks up the habit of skipping the working, which it cannot afford. Reinforcement learning has to find that out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rljob.api.resolve import DEFAULT_PROMPT
from rljob.api.tasks import ReasoningGym, Task
from rljob.api.templates import fill
from rljob.protocol.data import is_held_out
from rljob.protocol.startup import lazy_imports

with lazy_imports("cellpylib"):  # it imports matplotlib, which takes as long as all of reasoning_gym
    from reasoning_gym.factory import create_dataset


@dataclass(frozen=True)
class Problem:
    """A prompt and the arithmetic in it, for example '2 - 3 + 7'."""

    prompt: str
    expression: str


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to learn."""

    prompt: str
    answer: str


SUMS = ReasoningGym(
    dataset="chain_sum",
    config={"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1, "allow_negation": False},
)
"""What is taught for tasks whose data is a file."""


def draw_problems(task: Task, seed: int) -> Iterator[Problem]:
    """Yield problems that are not held out: the task's own, or :data:`SUMS` in their own words when its data is a file.

    Raises:
        ValueError: the task is of another kind than chain_sum, the one that is taught here, or it is a chat.
    """
    gym, template = task.data.reasoning_gym or SUMS, task.prompt
    if gym.dataset != "chain_sum":
        raise ValueError(f"task {task.name!r} is {gym.dataset!r}; this initializer teaches chain_sum only")
    if task.data.reasoning_gym is None:
        template = DEFAULT_PROMPT
    if template is None:
        raise ValueError(f"task {task.name!r} is a chat; this initializer teaches plain prompts only")
    first = random.Random(seed).randrange(2**31)  # the dataset adds the row to it: seeds 1 and 2 would be twins
    for row in create_dataset(gym.dataset, **{**gym.config, "seed": first, "size": 10_000_000}):
        if not is_held_out(row["question"]):
            yield Problem(fill(template, row), row["metadata"]["expression"])


def work_out(expression: str) -> str:
    """Return the answer with its working: '2-3=-1;-1+7=6;<answer>6</answer>' for '2 - 3 + 7'.

    Each step says what it starts from: without that a small model hardly learns to follow.
    """
    first, *rest = expression.split()
    total, working = int(first), ""
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        working += f"{total}{operator}{operand}"
        total += int(operand) if operator == "+" else -int(operand)
        working += f"={total};"
    return working + result(expression)


def result(expression: str) -> str:
    """Return the bare answer: '<answer>6</answer>' for '2 - 3 + 7'."""
    total, sign = 0, 1
    for word in expression.split():
        if word in "+-":
            sign = 1 if word == "+" else -1
        else:
            total += sign * int(word)
    return f"<answer>{total}</answer>"


def lesson(problems: Iterator[Problem], count: int, bare: float, seed: int) -> list[Example]:
    """Return ``count`` examples; a share ``bare`` of their answers is without working."""
    rng = random.Random(seed)
    examples = []
    for _ in range(count):
        problem = next(problems)
        answer = result if rng.random() < bare else work_out
        examples.append(Example(problem.prompt, answer(problem.expression)))
    return examples
