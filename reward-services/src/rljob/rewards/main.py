"""Entry point of the service of a built-in reward or a function: rljob-reward. With ``--check`` it prints the problems
that prevent serving the functions of a job; ``--serve FUNCTION HOST:PORT PROCESSES SECONDS`` needs no job."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rljob.protocol.exit_codes import CONFIGURATION_ERROR

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec
    from rljob.rewards.evaluate import RewardEvaluator


def main() -> None:
    """Serve the reward called RLJOB_NAME; exit with code 2 if the job has no such reward, or it cannot be made."""
    if sys.argv[1:] == ["--check"]:
        sys.exit(_check())
    if sys.argv[1:2] == ["--serve"]:
        reference, listen, processes, seconds = sys.argv[2:]
        serve_function(reference, listen, int(processes), float(seconds))
        return
    from rljob.protocol.startup import end_on_sigterm

    end_on_sigterm()
    from rljob.protocol.environment import read_environment, remove_token
    from rljob.protocol.service_server import start_logging
    from rljob.rewards.sdk import reward_of, run

    start_logging()
    try:
        environment = read_environment()
        remove_token()
        reward = reward_of(environment)
        spec = environment.job.spec
        run(make_evaluator(spec, spec.rewards.index(reward)), reward, environment.listen, environment.token)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def _check() -> int:
    """Report the problems of the job's functions, one per line; return the exit code."""
    from rljob.protocol.environment import read_environment
    from rljob.protocol.startup import report_problems

    def find() -> Iterator[str]:
        environment = read_environment()
        yield from function_problems(environment.job.spec, environment.name)

    return report_problems(find)


def function_problems(spec: RLJobSpec, name: str = "") -> Iterator[str]:
    """Yield one sentence for each reason why function ``name`` of the job, or any function of it, cannot be served.

    Factories of a RewardKind are imported but not called, because calls may be slow. Validation has checked built-in
    rewards.
    """
    from rljob.api.rewards.load_reward import load_reward
    from rljob.rewards.evaluate import RewardEvaluator

    for i, reward in enumerate(spec.rewards):
        if reward.function is None or name not in ("", reward.name):
            continue
        try:
            loaded = load_reward(spec, i)
            assert loaded is not None, "the reward has a function"
            loaded.row_check()
            if loaded.plain_function is None:
                loaded.factory()
            else:
                evaluator = RewardEvaluator(loaded.plain_function, reward.name, loaded.field)
                evaluator.check_token_ids(reward, f"spec.rewards[{i}]")
        except ValueError as error:
            yield from str(error).splitlines()


def make_evaluator(spec: RLJobSpec, i: int) -> RewardEvaluator:
    """Return the evaluator of reward ``i`` of a job, a built-in reward or a function.

    Raises:
        ValueError: the reward is neither, or it cannot be made.
    """
    from rljob.api.rewards.load_reward import load_reward
    from rljob.rewards.evaluate import RewardEvaluator

    loaded = load_reward(spec, i)
    if loaded is None:
        raise ValueError(
            f"spec.rewards[{i}]: {spec.rewards[i].name} is not a builtin or a function; start its own program"
        )
    evaluator = RewardEvaluator(loaded.make_scorer(), loaded.name, loaded.field)
    evaluator.check_token_ids(spec.rewards[i], f"spec.rewards[{i}]")
    return evaluator


def serve_function(reference: str, listen: str, processes: int, timeout_seconds: float) -> None:
    """Serve a function or a class without a job, for a reward with ``url``; exit with code 2 if it cannot be served."""
    from rljob.api.extensions import load
    from rljob.api.rewards.load_reward import made
    from rljob.api.roles import Reward
    from rljob.protocol.service_server import start_logging
    from rljob.protocol.startup import end_on_sigterm
    from rljob.protocol.traceback_escape import escape_tracebacks
    from rljob.rewards.evaluate import RewardEvaluator
    from rljob.rewards.sdk import run

    end_on_sigterm()
    escape_tracebacks()
    start_logging()
    try:
        found = load({}, reference, "rljob reward serve")
        scorer = made(found, "rljob reward serve", found.__name__) if isinstance(found, type) else found
        reward = Reward(name="reward", processes=processes, timeout_seconds=timeout_seconds)
        run(RewardEvaluator(scorer, reference, "rljob reward serve"), reward, listen, "")
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


if __name__ == "__main__":
    main()
