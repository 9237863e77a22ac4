"""Training data of the quickstart's model before reinforcement learning: problems and right answers, as text.

All answers are right. Worked answers show each step; bare answers show only the result. A model that was last trained
on mostly bare answers tends to skip the steps and makes more mistakes. Reinforcement learning has to discover that.
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

with lazy_imports("cellpylib"):  # cellpylib imports matplotlib, which takes as long as all of reasoning_gym
    from reasoning_gym.factory import create_dataset


@dataclass(frozen=True)
class Problem:
    """A prompt and the arithmetic in it, for example '2 - 3 + 7'."""

    prompt: str
    expression: str


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to train on."""

    prompt: str
    answer: str


SUMS = ReasoningGym(
    dataset="chain_sum",
    config={"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1, "allow_negation": False},
)
"""Problems for tasks whose data is a file."""


def draw_problems(task: Task, seed: int) -> Iterator[Problem]:
    """Yield problems that are not held out: the task's, or :data:`SUMS` with the default prompt if its data is a file.
    An agent gets the default prompt too.

    Raises:
        ValueError: the task is a chat or of another kind than chain_sum.
    """
    gym, template = task.data.reasoning_gym or SUMS, task.prompt
    if gym.dataset != "chain_sum":
        raise ValueError(f"task {task.name!r} is {gym.dataset!r}; this initializer teaches chain_sum only")
    if task.data.reasoning_gym is None or task.agent is not None:
        template = DEFAULT_PROMPT
    if template is None:
        raise ValueError(f"task {task.name!r} is a chat; this initializer teaches plain prompts only")
    first = random.Random(seed).randrange(2**31)  # the dataset adds the row number: seeds 1 and 2 would overlap
    for row in create_dataset(gym.dataset, **{**gym.config, "seed": first, "size": 10_000_000}):
        if not is_held_out(row["question"]):
            yield Problem(fill(template, row), row["metadata"]["expression"])


def worked_answer(expression: str) -> str:
    """Return the answer with its steps: '2-3=-1;-1+7=6;<answer>6</answer>' for '2 - 3 + 7'.

    Each step repeats the number it starts from; otherwise a small model hardly learns the steps.
    """
    first, *rest = expression.split()
    total, working = int(first), ""
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        working += f"{total}{operator}{operand}"
        total += int(operand) if operator == "+" else -int(operand)
        working += f"={total};"
    return working + bare_answer(expression)


def bare_answer(expression: str) -> str:
    """Return the bare answer: '<answer>6</answer>' for '2 - 3 + 7'."""
    total, sign = 0, 1
    for term in expression.split():
        if term in "+-":
            sign = 1 if term == "+" else -1
        else:
            total += sign * int(term)
    return f"<answer>{total}</answer>"


def make_examples(problems: Iterator[Problem], count: int, bare: float, seed: int) -> list[Example]:
    """Return ``count`` examples; a fraction ``bare`` of their answers is bare."""
    rng = random.Random(seed)
    examples = []
    for _ in range(count):
        problem = next(problems)
        answer = bare_answer if rng.random() < bare else worked_answer
        examples.append(Example(problem.prompt, answer(problem.expression)))
    return examples
