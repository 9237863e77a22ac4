"""Entry point of the builtin rewards' service. With ``--check`` it only says what would keep it from starting."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob.api.models import RLJob
    from rljob.api.roles import Reward as Settings
    from rljob.rewards.sdk import Reward


def main() -> None:
    """Serve the builtin reward called RLJOB_NAME; exit code 2 when there is none or its surroundings are not right."""
    if sys.argv[1:] == ["--check"]:
        sys.exit(_check())
    from rljob.protocol.startup import end_on_sigterm

    end_on_sigterm()
    from rljob.protocol.environment import read_environment
    from rljob.rewards.sdk import FORMAT, run, settings_of

    logging.basicConfig(level=os.environ.get("RLJOB_LOG_LEVEL", "INFO"), format=FORMAT)
    try:
        environment = read_environment()
        settings = settings_of(environment)
        run(make_builtin(settings, environment.job), settings, environment.listen)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)


def _check() -> int:
    """Make the job's builtin rewards; print what is wrong, a line each, on stderr; return the exit code.

    All but reasoning_gym: its datasets take seconds, and the runner's check makes the same ones.
    """
    from rljob.protocol.environment import read_environment
    from rljob.protocol.startup import report_problems

    os.environ.setdefault("RLJOB_STORAGE", os.devnull)  # nothing in it is needed

    def find() -> Iterator[str]:
        job = read_environment().job
        for i, settings in enumerate(job.spec.rewards):
            if settings.builtin not in (None, "reasoning_gym"):
                try:
                    make_builtin(settings, job)
                except ValueError as error:
                    yield f"spec.rewards[{i}]: {error}"

    return report_problems(find)


def make_builtin(settings: Settings, job: RLJob) -> Reward:
    """Return the builtin reward that an entry of the manifest names.

    Raises:
        ValueError: it names none, or what it needs is not there.
    """
    match settings.builtin:
        case "exact_match":
            from rljob.api.builtin_rewards import exact_match
            from rljob.rewards.exact_match_reward import ExactMatchReward

            return ExactMatchReward(exact_match(settings.config))
        case "reasoning_gym":
            from rljob.rewards.reasoning_gym_reward import ReasoningGymReward  # takes seconds

            return ReasoningGymReward([task for task in job.spec.tasks if task.reward == settings.name])
        case None:
            raise ValueError(f"reward {settings.name} is no builtin; start its own program")


if __name__ == "__main__":
    main()
