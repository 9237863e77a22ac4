"""Entry point of the runner: rljob-runner. With ``--check`` it only prints the problems that would prevent a start."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE

if TYPE_CHECKING:
    from rljob.api.models import RLJob
    from rljob.runner.data.readers import DataReaders


def main() -> None:
    """Serve the coordinator that the environment names; exit with code 2 if the configuration is invalid."""
    # Some datasets iterate over sets of strings; see data.reasoning_gym_source.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if sys.argv[1:] == ["--check"]:
        sys.exit(_check())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from rljob.protocol.startup import end_on_sigterm

    end_on_sigterm()
    import uvloop

    from rljob.protocol.coordinator_link import RefusedError
    from rljob.protocol.environment import (
        environment_token,
        environment_urls,
        pool_token,
        pool_urls,
        read_environment,
        reward_token,
        reward_urls,
    )
    from rljob.protocol.model_cache import ModelUnavailableError
    from rljob.runner.app import serve
    from rljob.runner.setup import prepare

    try:
        environment = read_environment()
        prepared = prepare(environment, find_readers(environment.job))
        rewards, environments = (reward_urls(), reward_token()), (environment_urls(), environment_token())
        uvloop.run(serve(prepared, *rewards, *environments, pool_urls(), pool_token()))
    except (ValueError, RefusedError) as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
    except ModelUnavailableError as error:
        logging.error("%s", error)
        sys.exit(FAILURE)


def _check() -> int:
    """Report the problems, one per line; return the exit code."""
    from rljob.protocol.environment import read_environment
    from rljob.protocol.startup import report_problems
    from rljob.runner.setup import check

    logging.disable()  # a check prints problems only; the runner logs its warnings when it starts
    storage = os.environ.get("RLJOB_STORAGE")
    os.environ["RLJOB_STORAGE"] = storage or os.devnull  # a path below which no file exists

    def find() -> list[str]:
        environment = read_environment()
        will_initialize = not storage or environment.job.spec.initializer is not None
        return check(environment, find_readers(environment.job), will_initialize)

    return report_problems(find)


def find_readers(job: RLJob) -> DataReaders:
    """Return the readers that the data of ``job`` needs; only these are imported, because some imports take seconds."""
    from rljob.runner.data.readers import DataReaders

    kinds = {kind for task in job.spec.tasks for kind, source in task.data if source is not None}
    readers = DataReaders()
    if "reasoning_gym" in kinds:
        from rljob.runner.data.reasoning_gym_source import ReasoningGymSource

        readers = replace(readers, reasoning_gym=ReasoningGymSource)
    if kinds & {"parquet", "datasets"}:
        from rljob.runner.data.arrow import ParquetRows, open_split

        readers = replace(readers, parquet=ParquetRows, datasets=open_split)
    return readers


if __name__ == "__main__":
    main()
