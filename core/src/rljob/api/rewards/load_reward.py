"""Loads the code that ``builtin`` or ``function`` of a reward names, and checks options and data against this code.

The reward service and the runner call :func:`load_reward` in their preflight and at startup.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rljob.api.base import Model
from rljob.api.extensions import load
from rljob.api.rewards import REWARDS, RewardKind, Row, Scorer
from rljob.api.tasks import Task

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec
    from rljob.api.roles import Reward

Made = TypeVar("Made")


@dataclass(frozen=True)
class LoadedReward:
    """A reward of a job with its valid options.

    ``field``: manifest field with the reference: spec.rewards[0].function. ``name``: name of the reward. ``tasks``: the
    tasks that use the reward.
    """

    field: str
    name: str
    kind: RewardKind
    options: Model
    tasks: Sequence[Task]

    @property
    def plain_function(self) -> Scorer | None:
        """What is called for each sample if ``function`` names a plain function or a class, else None."""
        make = self.kind.make
        if isinstance(make, _PlainClass):
            return functools.partial(make.scorers.__call__, None)
        return make.scorer if isinstance(make, _PlainFunction) else None

    def row_check(self) -> Callable[[Row], None] | None:
        """Return the function that raises ValueError if the reward cannot score a row; None: it scores all rows.

        Raises:
            ValueError: the function cannot be imported.
        """
        if self.kind.row_check is None:
            return None
        check = self._imported(self.kind.row_check)

        def check_row(row: Row) -> None:
            try:
                check(row, self.options)
            except ValueError as error:
                raise ValueError(f"reward {self.name} cannot score the row: {error}") from error
            except Exception as error:  # a user's function may raise any exception; the user gets one sentence
                raise ValueError(
                    f"the row check of reward {self.name} raised {type(error).__name__}: {error}; raise ValueError "
                    "for a row that the reward cannot score"
                ) from error

        return check_row

    def factory(self) -> Callable[[Model, Sequence[Task]], Scorer]:
        """Return the function that makes the scorer.

        Raises:
            ValueError: the function cannot be imported.
        """
        make: Callable[[Model, Sequence[Task]], Scorer] = self._imported(self.kind.make)
        return make

    def make_scorer(self) -> Scorer:
        """Make the scorer.

        Raises:
            ValueError: the factory cannot be imported, or it raises an exception.
        """
        factory = self.factory()
        return made(lambda: factory(self.options, self.tasks), self.field, "it or its config")

    def _imported(self, code: Any) -> Any:
        return load({}, code, self.field) if isinstance(code, str) else code


@dataclass(frozen=True)
class _PlainFunction:
    """Factory of a plain function: the scorer is the function itself."""

    scorer: Scorer

    def __call__(self, options: Model, tasks: Sequence[Task]) -> Scorer:
        return self.scorer


@dataclass(frozen=True)
class _PlainClass:
    """Factory of a class: the scorer is an instance, made once in the service before the workers are forked."""

    scorers: type[Any]

    def __call__(self, options: Model, tasks: Sequence[Task]) -> Scorer:
        scorer: Scorer = self.scorers()
        return scorer


def load_reward(spec: RLJobSpec, i: int) -> LoadedReward | None:
    """Return reward ``i`` of a job; None if a program or a service of the user serves it.

    Raises:
        ValueError: the code cannot be imported, or options or data do not fit it. The message has one line for each
            problem, which begins with the field. ``__cause__`` is an ImportError if this process lacks the package.
    """
    reward, where = spec.rewards[i], f"spec.rewards[{i}]"
    if reward.builtin is not None:
        field, kind = f"{where}.builtin", REWARDS[reward.builtin]
    elif reward.function is not None:
        field = f"{where}.function"
        kind = _as_kind(load({}, reward.function, field), reward, where)
    else:
        return None
    named = [task for task in spec.tasks if reward.name in task.named_rewards]
    tasks = [task for task in spec.tasks if task in named or (task.reward_column and kind.accepts(task.data.sources))]
    problems = [f"{where}.{problem}" for problem in kind.option_problems(reward.config)]
    problems += [f"{field}: {problem}" for problem in _data_problems(kind, reward, named)]
    if problems:
        raise ValueError("\n".join(problems))
    return LoadedReward(field, reward.name, kind, kind.parse(reward.config), tasks)


def _as_kind(found: Any, reward: Reward, where: str) -> RewardKind:
    """Return the object that ``function`` names as a RewardKind. A plain function is a scorer without options."""
    if isinstance(found, RewardKind):
        return found
    scores = inspect.isclass(found) and any("__call__" in vars(base) for base in found.__mro__)
    if not callable(found) or (inspect.isclass(found) and not scores):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        remedy = "name a function, a class with __call__, or a RewardKind"
        raise ValueError(f"{where}.function: {reward.function} is {kind}; {remedy}")
    if reward.config:
        raise ValueError(
            f"{where}.config: {reward.function} is a function, which has no options; remove config, or name a "
            "RewardKind with options"
        )
    return RewardKind(make=_PlainClass(found) if scores else _PlainFunction(found))


def _data_problems(kind: RewardKind, reward: Reward, tasks: Sequence[Task]) -> Iterator[str]:
    for task in tasks:
        if not kind.accepts(task.data.sources):
            yield (
                f"{reward.builtin or reward.function} scores {kind.accepted} data only, and the data of task "
                f"{task.name} are {' and '.join(task.data.sources)}; use another reward for the task"
            )


def made(make: Callable[[], Made], field: str, remedy: str) -> Made:
    """Return what a user's code makes.

    Raises:
        ValueError: it raises an exception. ``remedy``: what the user must correct.
    """
    try:
        return make()
    except (Exception, SystemExit) as error:  # a user's code may raise any exception; the user gets one sentence
        raise ValueError(
            f"{field}: the reward cannot be made ({type(error).__name__}: {error}); correct {remedy}"
        ) from error
