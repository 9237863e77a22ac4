"""Commands for environments: env new, env serve, env play, env check."""

from __future__ import annotations

from typing import Annotated

import typer

from rljob.cli.options import Format, Listen, Output, become, echo
from rljob.local.environment_template import write_environment

app = typer.Typer(help="Make, serve, play and check an environment.", no_args_is_help=True, rich_markup_mode=None)
MODULE = "rljob.environments.main"
Reference = Annotated[
    str,
    typer.Argument(
        metavar="NAME|MODULE:CLASS", help="An environment of rljob, or one of your own.", show_default=False
    ),
]
Config = Annotated[str, typer.Option("--config", metavar="JSON", help="Options of the environment.")]


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the folder and of the Python module.", show_default=False)],
) -> None:
    """Make a folder with an environment and its test."""
    folder = write_environment(name)
    echo(
        f"{folder}/{name}.py        the environment\n"
        f"{folder}/test_{name}.py   its test: python -m pytest {folder}\n"
        f"Play it:  rljob env play {name}.{name}:Environment\n"
        f"Check it: rljob env check {name}.{name}:Environment"
    )


@app.command()
def serve(
    environment: Reference,
    config: Config = "{}",
    listen: Listen = "127.0.0.1:8000",
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for one step.")] = 60.0,
) -> None:
    """Serve an environment over HTTP until Ctrl-C, for an environment with `url`. It needs no token."""
    become(MODULE, "--serve", environment, config, listen, str(timeout))


@app.command()
def play(
    environment: Reference,
    config: Config = "{}",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the row and of the episode.")] = 0,
) -> None:
    """Play an episode: an action a line, Ctrl-D ends it."""
    become(MODULE, "--play", environment, config, str(seed))


@app.command()
def check(
    environment: Reference,
    config: Config = "{}",
    episodes: Annotated[int, typer.Option("--episodes", min=1, max=100_000, help="Episodes of each agent.")] = 100,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100_000, help="Steps of an episode, at most.")] = 100,
    output: Output = Format.TEXT,
) -> None:
    """Play random and scripted episodes: scores, speed, determinism by seed, strange actions, memory.

    Exit code 1: the environment has a defect.
    """
    become(MODULE, "--verify", environment, config, str(episodes), str(steps), output.value)
