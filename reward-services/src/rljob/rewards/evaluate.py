"""Evaluates a reward on samples: each sample gets a reward or an error."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from rljob.api.extensions import is_async
from rljob.api.rewards import NotScored, Parts, Scorer, Unavailable, is_batch, is_deterministic
from rljob.api.roles import Reward
from rljob.protocol.score_messages import MAX_ERROR, MAX_MAGNITUDE, Score, ScoreItem, usable

TOKEN_IDS = "response_token_ids"
FIELDS = ("prompt", "completion", "finish", "problem", "task", "turns", "response_tokens", "metadata", TOKEN_IDS)
"""Possible parameters of a reward: fields of a ScoreItem."""

KINDS = {
    " raised ": "raised",
    " did not score the sample": "not_scored",
    " cannot score now": "unavailable",
    " took longer than ": "timeout",
    " returned ": "unusable",
    ": the worker ": "crash",
}
"""How the errors of a reward continue after its name → kind of error."""
Send = Callable[[Score], None]


class RewardEvaluator:
    """Scores samples by one reward; never raises.

    Args:
        scorer: called with the keyword arguments of :data:`FIELDS` that it names, or with all if it takes ``**_``.
            It may be async. Marked with :func:`rljob.api.rewards.batch` it gets lists, and returns a list. For each
            sample it returns a number, a number and a mapping of names to further numbers, Parts, or NotScored.
        name: of the reward, for errors.
        field: field of the manifest that names the scorer, for errors; empty if a user's program passes the scorer.

    Raises:
        ValueError: the scorer cannot be called like this; the message names the cause.
    """

    def __init__(self, scorer: Scorer, name: str, field: str = "") -> None:
        self._scorer = scorer
        self.name = name
        """Of the reward, in errors."""
        self._async = callable(scorer) and is_async(scorer)
        self._runner: asyncio.Runner | None = None
        self.batched = is_batch(scorer)
        self.deterministic = is_deterministic(scorer)
        try:
            self._fields = fields_of(scorer, name)
        except ValueError as error:
            raise ValueError(f"{field}: {error}" if field else str(error)) from None

    def check_token_ids(self, reward: Reward, where: str) -> None:
        """Check that samples have the token ids if the scorer names them.

        Raises:
            ValueError: they have none; ``where`` is the path of ``reward`` in the manifest.
        """
        if TOKEN_IDS in self._fields and self._fields != FIELDS and not reward.token_ids:
            raise ValueError(f"{where}.tokenIds: reward {reward.name} asks for {TOKEN_IDS!r}; set tokenIds: true")

    @property
    def together(self) -> bool:
        """Whether samples of a chunk are scored at the same time, so that each may cause a failure of the worker."""
        return self.batched or self._async

    def set_up(self) -> None:
        """Call the method ``set_up`` of the scorer, in a worker before its first sample. It may be async."""
        if callable(set_up := getattr(self._scorer, "set_up", None)):
            result = set_up()
            if inspect.isawaitable(result):
                self._run(_limited(result, None))

    def __call__(self, item: ScoreItem) -> Score:
        """Return the score of ``item``."""
        scores: list[Score] = []
        self.score_all([item], scores.append)
        return scores[0]

    def score_all(self, items: Sequence[ScoreItem], send: Send, seconds: float | None = None) -> None:
        """Call ``send`` with the score of each item, in order.

        Args:
            items: the samples.
            send: receives the scores.
            seconds: limit for one sample of an async scorer; the pool ends a worker that exceeds it otherwise.
        """
        if seconds is not None and callable(set_time_limit := getattr(self._scorer, "set_time_limit", None)):
            set_time_limit(seconds)
        if self.batched:
            for score in self._score_batch(items, seconds):
                send(score)
        elif self._async:
            self._run(self._score_concurrently(items, send, seconds))
        else:
            for item in items:
                send(self._guarded(item, lambda item=item: self._scorer(**self._arguments(item))))  # type: ignore[misc]

    def _score_batch(self, items: Sequence[ScoreItem], seconds: float | None) -> list[Score]:
        """Return the scores of one call; if it fails, the samples are scored one by one to find the cause."""
        try:
            result: Any = self._scorer(**{field: [getattr(item, field) for item in items] for field in self._fields})
            if self._async:
                result = self._run(_limited(result, None if seconds is None else seconds * len(items)))
            results = list(result)
            if len(results) != len(items):
                raise ValueError(f"it returned {len(results)} scores for {len(items)} samples; return one for each")
        except Exception as error:  # noqa: BLE001 user code may raise anything
            if len(items) > 1:
                return [score for item in items for score in self._score_batch([item], seconds)]
            return [self._failure(items[0], error, seconds)]
        return [self._guarded(item, lambda each=each: each) for item, each in zip(items, results, strict=True)]  # type: ignore[misc]

    async def _score_concurrently(self, items: Sequence[ScoreItem], send: Send, seconds: float | None) -> None:
        tasks = [asyncio.create_task(self._score_async(item, seconds)) for item in items]
        for task in tasks:
            send(await task)

    async def _score_async(self, item: ScoreItem, seconds: float | None) -> Score:
        scorer: Any = self._scorer
        try:
            result = await _limited(scorer(**self._arguments(item)), seconds)
        except Exception as error:  # noqa: BLE001 user code may raise anything
            return self._failure(item, error, seconds)
        return self._guarded(item, lambda: result)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:  # one for the life of a worker, so that connections of the scorer stay usable
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    def _arguments(self, item: ScoreItem) -> dict[str, Any]:
        return {field: getattr(item, field) for field in self._fields}

    def _guarded(self, item: ScoreItem, result: Callable[[], Any]) -> Score:
        """Return the score for what ``result`` returns or raises."""
        try:
            return self._score_of(item, result())
        except Exception as error:  # noqa: BLE001 user code may raise anything; the error is the result of the sample
            return self._failure(item, error, None)

    def _failure(self, item: ScoreItem, error: Exception, seconds: float | None) -> Score:
        if isinstance(error, NotScored):
            return self._not_scored(item, error)
        if isinstance(error, Unavailable):
            return unavailable_score(item.sample, self.name, str(error))
        if isinstance(error, _LimitExceeded):
            return error_score(item.sample, time_limit_sentence(self.name, seconds or 0.0))
        return error_score(item.sample, f"reward {self.name} raised {described(error)}")

    def _score_of(self, item: ScoreItem, result: Any) -> Score:
        """Return the score for what the scorer returned. Objects of user code may raise here."""
        if isinstance(result, type) and issubclass(result, NotScored):
            result = result()
        if isinstance(result, NotScored):
            return self._not_scored(item, result)
        if result is None:
            return error_score(item.sample, f"reward {self.name} returned None: it did not score the sample")
        if isinstance(result, Parts):
            result = _sum_of(result)
        reward, metrics = result if _is_pair(result) else (result, {})
        for key, value in [("reward", reward), *metrics.items()]:
            if not _is_number(value):
                wanted = f"a number from -{MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g}"
                return error_score(item.sample, f"reward {self.name} returned {value!r} as {key}; return {wanted}")
        return Score(item.sample, float(reward), {str(key): float(value) for key, value in metrics.items()}, "")

    def _not_scored(self, item: ScoreItem, reason: NotScored) -> Score:
        return error_score(item.sample, f"reward {self.name} did not score the sample: {described(reason)}")


class _LimitExceeded(Exception):
    """An async scorer took longer than its limit."""


async def _limited(work: Awaitable[Any], seconds: float | None) -> Any:
    """Await ``work``.

    Raises:
        _LimitExceeded: it takes longer than ``seconds``. A TimeoutError of the work itself is raised as it is.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise _LimitExceeded from None
        raise


def time_limit_sentence(name: str, seconds: float) -> str:
    """Return the error of a sample that took longer than its limit."""
    return f"reward {name} took longer than {seconds:g} s"


def error_kind(name: str, error: str) -> str:
    """Return the kind of an error of reward ``name``, for metrics: raised, not_scored, unavailable, timeout, unusable
    (what it returned is no score), crash or other."""
    rest = error.removeprefix(f"reward {name}").removeprefix("the reward")
    for beginning, kind in KINDS.items():
        if rest != error and rest.startswith(beginning):
            return kind
    return "other"


def error_score(sample: str, reason: str) -> Score:
    """Return the score of a sample that could not be scored. Lone surrogates in ``reason`` are escaped."""
    return Score(sample, 0.0, {}, reason[:MAX_ERROR].encode(errors="backslashreplace").decode())


def unavailable_score(sample: str, name: str, reason: str) -> Score:
    """Return the score of a sample that reward ``name`` cannot score now; the runner asks for it again."""
    error = error_score(sample, f"reward {name} cannot score now: {reason}").error
    return Score(sample, 0.0, error=error, later=True)


def described(error: BaseException) -> str:
    """Return what an exception says, with its type; of NotScored only its reason."""
    try:
        return str(error) if isinstance(error, NotScored) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 an exception of user code may be unable to describe itself
        return type(error).__name__


def fields_of(scorer: Any, name: str) -> tuple[str, ...]:
    """Return the names of :data:`FIELDS` that a scorer takes.

    Raises:
        ValueError: it cannot be called with them; the message names the cause.
    """
    if not callable(scorer):
        raise ValueError(f"reward {name} is of type {type(scorer).__name__}, which is not callable; use a function")
    if _is_generator(scorer):
        raise ValueError(f"reward {name} is a generator; return the score instead of yielding it")
    parameters = inspect.signature(scorer).parameters.values()
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        optional = variadic or parameter.default is not parameter.empty
        if not optional and (parameter not in by_name or parameter.name not in FIELDS):
            raise ValueError(f"reward {name} asks for {parameter.name!r}; there are {', '.join(FIELDS)}, by name")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return FIELDS
    return tuple(parameter.name for parameter in by_name if parameter.name in FIELDS)


def _is_generator(scorer: Any) -> bool:
    """Return whether a scorer yields instead of returning; one that is not async may yield the scores of a batch."""
    functions, batched = (scorer, type(scorer).__call__), is_batch(scorer)
    return any(
        inspect.isasyncgenfunction(each) or (inspect.isgeneratorfunction(each) and not batched) for each in functions
    )


def _sum_of(parts: Parts) -> tuple[Any, dict[str, Any]]:
    """Return the weighted sum of ``parts``, and their metrics; a part that is not a number in place of the sum."""
    for value in parts.values.values():
        if not _is_number(value):
            return value, {}
    total = math.fsum(parts.weights.get(name, 1.0) * float(value) for name, value in parts.values.items())
    return total, {**{f"reward/{name}": value for name, value in parts.values.items()}, **parts.metrics}


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a usable number, of Python, NumPy or a similar library."""
    try:
        return math.isfinite(value) and usable(float(value))
    except (TypeError, OverflowError, ValueError):
        return False
