"""Entry point of the builtin rewards' service."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from rljob.protocol.exit_codes import CONFIGURATION_ERROR

if TYPE_CHECKING:
    from rljob.api.models import RLJob
    from rljob.api.roles import Reward as Settings
    from rljob.rewards.sdk import Reward


def main() -> None:
    """Serve the builtin reward called RLJOB_NAME; exit code 2 when there is none or its surroundings are not right."""
    from rljob.protocol.startup import end_on_sigterm

    end_on_sigterm()
    from rljob.protocol.environment import LOG_LEVEL, read_environment
    from rljob.rewards.sdk import FORMAT, run, settings_of

    logging.basicConfig(level=os.environ.get(LOG_LEVEL, "INFO"), format=FORMAT)
    try:
        environment = read_environment()
        settings = settings_of(environment)
        run(make_builtin(settings, environment.job), settings, environment.listen)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def make_builtin(settings: Settings, job: RLJob) -> Reward:
    """Return the builtin reward that an entry of the manifest names.

    Raises:
        ValueError: it names none, or what it needs is not there.
    """
    from rljob.api.extensions import load

    match settings.builtin:
        case "exact_match":
            from rljob.api.builtin_rewards import exact_match
            from rljob.rewards.exact_match_reward import ExactMatchReward

            return ExactMatchReward(exact_match(settings.config))
        case "reasoning_gym":
            from rljob.rewards.reasoning_gym_reward import ReasoningGymReward  # takes seconds

            return ReasoningGymReward([task for task in job.spec.tasks if task.reward == settings.name])
        case None if settings.function is not None:
            reward: Reward = load({}, settings.function, "function")
            return reward
        case None:
            raise ValueError(f"reward {settings.name} is no builtin; start its own program")


if __name__ == "__main__":
    main()
