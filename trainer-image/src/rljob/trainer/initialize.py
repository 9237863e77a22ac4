"""Prepares a job's storage before other processes start:

    python -m rljob.trainer.initialize -- [COMMAND [ARGUMENT …]]

First it downloads remote models (rljob.protocol.model_cache), then it runs the command of spec.initializer, in a
cluster. `rljob run` runs the command itself. The command runs once: it is skipped if the storage already holds its
result or a run uses it (see rljob.protocol.initializer_stamp). Its environment has RLJOB_JOB (the resolved manifest),
RLJOB_STORAGE and RLJOB_SEED; job://PATH in an argument is PATH in the storage.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile

from rljob.api.model_address import is_remote
from rljob.api.resolve import in_storage
from rljob.protocol import initializer_stamp
from rljob.protocol.environment import SEED, ComponentEnvironment, read_environment, search_path
from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE
from rljob.protocol.model_cache import ModelUnavailableError, read_model
from rljob.protocol.startup import end_on_sigterm

log = logging.getLogger(__name__)


def download_models(environment: ComponentEnvironment) -> None:
    """Decide the versions of the remote models, and download them unless each pod does so itself.

    Raises:
        ValueError: a download is refused; the sentence begins with the field.
        ModelUnavailableError: a download failed and may be repeated.
    """
    for model in environment.job.spec.models:
        if is_remote(model.source):
            environment.storage.mkdir(parents=True, exist_ok=True)
            read_model(environment, model.name, download=not environment.job.spec.downloads.empty_dir)


def initialize(command: list[str], environment: ComponentEnvironment) -> int:
    """Run ``command`` unless its result exists or is in use; return the exit code.

    Raises:
        ValueError: the command cannot be run, or leaves no model.
    """
    job, storage = environment.job, environment.storage
    if job.spec.initializer is None:
        raise ValueError("spec.initializer: the job has none; remove this step")
    storage.mkdir(parents=True, exist_ok=True)
    key = initializer_stamp.content_key(job)
    if initializer_stamp.done(storage, key):
        log.info("the storage holds the result of the initializer")
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".json") as manifest:
        manifest.write(job.model_dump_json(by_alias=True))
        manifest.flush()
        code = _run([in_storage(argument, storage) for argument in command], manifest.name, job.spec.seed)
    if code:
        log.error("the initializer %s", f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")
        return code if code > 0 else 128 - code
    for i, model in enumerate(job.spec.models):
        path = environment.path(model.source)
        if not (is_remote(model.source) or path.is_dir()):
            raise ValueError(f"spec.models[{i}].source: the initializer left no directory {path}; correct one of them")
    initializer_stamp.mark_done(storage, key)
    return 0


def _run(command: list[str], manifest: str, seed: int) -> int:
    """Run ``command`` and wait for its end; forward SIGTERM and SIGINT to it."""
    variables = os.environ | {"PATH": search_path(), "RLJOB_JOB": manifest, SEED: str(seed)}
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals received before the process was started

    def forward(number: int, _: object) -> None:
        early.append(number) if process is None else process.send_signal(number)

    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, forward)
    try:
        process = subprocess.Popen(command, env=variables)
    except OSError as error:
        raise ValueError(f"spec.initializer.command: {command[0]!r} cannot be started: {error.strerror}") from None
    for number in early:
        process.send_signal(number)
    return process.wait()


def main() -> None:
    """Initialize the storage of the job that the environment names; exit with code 2 if a restart does not help."""
    end_on_sigterm()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    mark, *command = sys.argv[1:] or [""]
    if mark != "--":
        logging.error("usage: python -m rljob.trainer.initialize -- [COMMAND [ARGUMENT …]]")
        sys.exit(CONFIGURATION_ERROR)
    try:
        environment = read_environment()
        download_models(environment)
        sys.exit(initialize(command, environment) if command else 0)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
    except ModelUnavailableError as error:
        logging.error("%s", error)
        sys.exit(FAILURE)


if __name__ == "__main__":
    main()
