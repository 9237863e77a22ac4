"""Serves one environment until SIGTERM; :func:`serve` is for a user's own program."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from rljob.api.environments.load_environment import LoadedEnvironment, as_kind, load_environment
from rljob.api.roles import Environment
from rljob.environments.episode import Calls
from rljob.environments.session_server import build_session_app
from rljob.environments.session_table import SessionTable
from rljob.protocol.environment import ComponentEnvironment, own_entry, read_environment, remove_token
from rljob.protocol.episode_messages import MAX_REQUEST_BYTES
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.service_server import ServiceServer, start_logging
from rljob.protocol.startup import end_on_sigterm

log = logging.getLogger(__name__)

IDLE_SECONDS = 75
"""Between two requests of a connection: an episode waits for the model between its steps."""
DEFAULT_LISTEN = "127.0.0.1:8000"


def serve(environment: Any) -> None:
    """Serve an environment until SIGTERM, as the environment of the job that started this program.

    The entry in the manifest sets the limits. Only the job's runner, which sends RLJOB_TOKEN, gets episodes. A program
    that a user starts, for an environment with ``url``, serves everyone at RLJOB_LISTEN (HOST:PORT). Exits with code 2
    if ``environment`` is neither a class with reset and step nor an EnvironmentKind without required options.
    """
    end_on_sigterm()
    start_logging()
    try:
        name = getattr(environment, "__name__", "the environment")
        kind = as_kind(environment, name, "serve")
        factory = LoadedEnvironment("serve", name, kind, kind.parse({})).factory()
        if os.environ.get("RLJOB_JOB"):
            context = read_environment()
            remove_token()
            run(factory, environment_of(context), context.listen, context.token)
        else:
            listen = os.environ.get("RLJOB_LISTEN", DEFAULT_LISTEN)
            run(factory, Environment(name="environment"), listen, "")
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


def environment_of(context: ComponentEnvironment) -> Environment:
    """Return the entry of the manifest that this process serves.

    Raises:
        ValueError: RLJOB_NAME is not an environment of the job.
    """
    return own_entry(context.job.spec.environments, context.name, "an environment")


def make_factory(environment: Environment, where: str) -> Callable[[], Any]:
    """Return the function that makes the environment of an episode, of a builtin or a function.

    Raises:
        ValueError: the environment is neither, or its code or options are invalid.
    """
    loaded = load_environment(environment, where)
    if loaded is None:
        raise ValueError(f"{where}: {environment.name} is not a builtin or a function; start its own program")
    factory = loaded.factory()
    if loaded.kind.needs_package:
        try:
            made = factory()
            made.reset(0, {"seed": 0})
        except ValueError as error:
            raise ValueError(f"{where}.config.{error}") from error
        if hasattr(made, "close"):
            made.close()
    return factory


def run(factory: Callable[[], Any], environment: Environment, listen: str, token: str) -> None:
    """Serve episodes at ``listen`` (HOST:PORT) until SIGTERM.

    Args:
        factory: makes the environment of an episode.
        environment: entry of the manifest.
        listen: address.
        token: that requests must send; empty: none.
    """
    calls = Calls(environment.name, environment.timeout_seconds)
    table = SessionTable(factory, calls, environment.max_sessions, environment.idle_seconds)
    app = build_session_app(table, token)
    ServiceServer(app, listen, token, MAX_REQUEST_BYTES, IDLE_SECONDS).serve_until_signal()
