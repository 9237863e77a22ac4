"""Commands for rewards of your own: reward new, reward serve, reward check."""

from __future__ import annotations

import json
import re
import statistics
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from rljob.api.extensions import REFERENCE
from rljob.api.text_escape import escape_line
from rljob.cli.options import Format, Listen, LocalRunName, Output, Overrides, become, echo, echo_json
from rljob.local import find_run, reward_template
from rljob.local.errors import CliError
from rljob.local.reward_check import check_reward, checked_job, pool_server
from rljob.local.screen import Terminal
from rljob.protocol.score_messages import CheckedSample

app = typer.Typer(help="Make, serve and check a reward of your own.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the folder and of the Python module.", show_default=False)],
) -> None:
    """Make a folder with a reward, its test and its Dockerfile."""
    folder = reward_template.write(name)
    echo(
        f"{folder}/{name}.py        the reward\n{folder}/test_{name}.py   its test: python -m pytest {folder}\n"
        f"{folder}/Dockerfile       its image, for a cluster\n"
        f"Serve it: rljob reward serve {name}.{name}:reward"
    )


@app.command()
def serve(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The reward.", show_default=False)],
    listen: Listen = "127.0.0.1:8000",
    processes: Annotated[int, typer.Option("--processes", min=1, max=256, help="Worker processes.")] = 1,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, max=3600, help="Seconds for one sample.")] = 10.0,
) -> None:
    """Serve a reward of your own over HTTP until Ctrl-C, for a reward with `url`. It needs no token."""
    if not re.fullmatch(REFERENCE, function):
        raise CliError(f"{function!r} is not MODULE:FUNCTION, such as my_rewards:reward", 2)
    become("rljob.rewards.main", "--serve", function, listen, str(processes), str(timeout))


@app.command()
def check(
    run: LocalRunName = None,
    reward: Annotated[
        str | None, typer.Option("--reward", metavar="NAME", help="Reward of the run. Default: the only one.")
    ] = None,
    function: Annotated[
        str | None,
        typer.Option("--function", metavar="MODULE:FUNCTION", help="Score by this one instead of the run's."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            metavar="NAME=URL",
            help="Server that stands for a frozen pool, with OpenAI's API. RLJOB_POOL_TOKEN is its token.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Model's name at --pool. Default: that of the pool.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Number of samples, the newest.")] = 100,
    overrides: Overrides = None,
    output: Output = Format.TEXT,
) -> None:
    """Score recorded samples of a run again: scores, errors, and time per sample.

    Exit code 1: a sample could not be scored.
    """
    directory = find_run.find(run)
    job, name = checked_job(directory.job(), reward, function, overrides or [])
    found = check_reward(directory, job, name, limit, None if pool is None else pool_server(pool, model))
    if output is Format.JSON:
        echo_json(json.dumps({"samples": msgspec.to_builtins(found), **summary(found)}))
    else:
        Terminal().print(_table(found))
        echo(_sentence(name, summary(found)))
    if any(each.error for each in found):
        raise typer.Exit(1)


def summary(found: list[CheckedSample]) -> dict[str, float | int | None]:
    """Return the counts and times of a check; ``changed``: samples with another reward than the run recorded."""
    scored = [each for each in found if not each.error]
    seconds = sorted(each.seconds for each in found)
    return {
        "scored": len(scored),
        "errors": len(found) - len(scored),
        "changed": sum(each.recorded is not None and each.recorded != each.reward for each in scored),
        "mean_reward": statistics.fmean(each.reward for each in scored) if scored else None,
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_max": seconds[-1] if seconds else None,
    }


def _table(found: list[CheckedSample]) -> Table:
    table = Table("sample", "task", "recorded", "reward", "seconds", "error", box=None, pad_edge=False)
    for each in found:
        recorded = "" if each.recorded is None else f"{each.recorded:g}"
        reward = "" if each.error else f"{each.reward:g}"
        table.add_row(each.sample, each.task, recorded, reward, f"{each.seconds:.4f}", escape_line(each.error))
    return table


def _sentence(name: str, numbers: dict[str, float | int | None]) -> str:
    if not numbers["scored"]:
        return f"reward {name}: no sample scored, {numbers['errors']} errors"
    return (
        f"reward {name}: {numbers['scored']} scored, {numbers['errors']} errors, {numbers['changed']} with another "
        f"reward than recorded; mean {numbers['mean_reward']:.3f}; {numbers['seconds_median']:.4f} s a sample, "
        f"at most {numbers['seconds_max']:.4f} s"
    )
