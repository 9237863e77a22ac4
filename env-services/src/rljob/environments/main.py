"""Entry point of the service of a built-in environment or a class: rljob-environment. With ``--check`` it prints the
problems that prevent serving the functions of a job. ``--serve``, ``--play`` and ``--verify`` need no job; they are
behind `rljob env serve`, `rljob env play` and `rljob env check`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rljob.protocol.exit_codes import CONFIGURATION_ERROR

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec
    from rljob.api.roles import Environment


def main() -> None:
    """Serve the environment called RLJOB_NAME; exit with code 2 if the job has no such environment."""
    match sys.argv[1:]:
        case ["--check"]:
            sys.exit(_check())
        case ["--serve", reference, config, listen, seconds]:
            _serve(reference, config, listen, float(seconds))
            return
        case ["--play", reference, config, seed]:
            from rljob.environments.play import play

            sys.exit(_with(reference, config, lambda factory: play(factory, int(seed))))
        case ["--verify", reference, config, episodes, steps, output]:
            from rljob.environments.self_check import verify

            sys.exit(_with(reference, config, lambda factory: verify(factory, int(episodes), int(steps), output)))
    from rljob.protocol.startup import end_on_sigterm

    end_on_sigterm()
    from rljob.environments.environment_service import environment_of, make_factory, run
    from rljob.protocol.environment import read_environment, remove_token
    from rljob.protocol.service_server import start_logging

    start_logging()
    try:
        context = read_environment()
        remove_token()
        environment = environment_of(context)
        where = f"spec.environments[{context.job.spec.environments.index(environment)}]"
        run(make_factory(environment, where), environment, context.listen, context.token)
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def _check() -> int:
    """Report the problems of the job's functions, one per line; return the exit code."""
    from rljob.protocol.environment import read_environment
    from rljob.protocol.startup import report_problems

    def find() -> Iterator[str]:
        context = read_environment()
        yield from function_problems(context.job.spec, context.name)

    return report_problems(find)


def function_problems(spec: RLJobSpec, name: str = "") -> Iterator[str]:
    """Yield one sentence for each reason why environment ``name`` of the job, or any of those that only the service can
    check, cannot be served."""
    from rljob.environments.environment_service import make_factory

    for i, environment in enumerate(spec.environments):
        if not environment.checked_by_service or name not in ("", environment.name):
            continue
        try:
            make_factory(environment, f"spec.environments[{i}]")
        except ValueError as error:
            yield from str(error).splitlines()


def _serve(reference: str, config: str, listen: str, timeout_seconds: float) -> None:
    """Serve an environment without a job, for an environment with ``url``; exit with code 2 if it cannot be served."""
    from rljob.environments.environment_service import make_factory, run
    from rljob.protocol.service_server import start_logging
    from rljob.protocol.startup import end_on_sigterm
    from rljob.protocol.traceback_escape import escape_tracebacks

    end_on_sigterm()
    escape_tracebacks()
    start_logging()
    try:
        entry = _entry(reference, config).model_copy(update={"timeout_seconds": timeout_seconds})
        run(make_factory(entry, "rljob env"), entry, listen, "")
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def _with(reference: str, config: str, use: object) -> int:
    """Call ``use`` with the factory of an environment; return its exit code, or 2 if there is no such environment."""
    from rljob.api.text_escape import escape_block
    from rljob.environments.environment_service import make_factory
    from rljob.protocol.service_server import start_logging
    from rljob.protocol.traceback_escape import escape_tracebacks

    assert callable(use)
    escape_tracebacks()
    start_logging("WARNING")
    try:
        code: int = use(make_factory(_entry(reference, config), "rljob env"))
    except ValueError as error:
        sys.stderr.write(escape_block(f"{error}\n"))
        return CONFIGURATION_ERROR
    return code


def _entry(reference: str, config: str) -> Environment:
    """Return the entry of a manifest for the name of a builtin or module:attribute, and options as JSON.

    Raises:
        ValueError: the options are not a JSON object, or there is no such environment.
    """
    import json

    from rljob.api.environments import ENVIRONMENTS
    from rljob.api.roles import Environment

    try:
        options = json.loads(config)
    except ValueError as error:
        raise ValueError(f"--config: {config!r} is not JSON ({error})") from None
    if not isinstance(options, dict):
        raise ValueError(f"--config: {config!r} is not a JSON object; write '{{\"OPTION\": VALUE}}'")
    if ":" not in reference and reference not in ENVIRONMENTS:
        raise ValueError(
            f"there is no environment {reference!r}; there are {', '.join(ENVIRONMENTS)}, or name module:attribute"
        )
    form = {"function": reference} if ":" in reference else {"builtin": reference}
    return Environment.model_validate({"name": "environment", **form, "config": options})


if __name__ == "__main__":
    main()
