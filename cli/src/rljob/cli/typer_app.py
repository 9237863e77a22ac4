"""All commands of rljob, and how their failures are reported.

Exit codes: 0 done, 1 a failure while running, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from rljob.api.errors import ManifestError
from rljob.api.text_escape import escape_block
from rljob.cli import (
    checkpoint_commands,
    cluster_commands,
    environment_commands,
    ledger,
    logs,
    manifest,
    reward_commands,
    run_control,
    simulate,
    status,
    top,
)
from rljob.cli.options import echo, report
from rljob.local.errors import CliError, Interrupted
from rljob.local.run_directory import VERSION

FAILURES = (ManifestError, CliError, Interrupted, OSError)
"""Exceptions that are reported as one sentence, without a traceback."""
LOCAL_ONLY = ("run", "evaluate", "reward", "env")
"""Commands that start processes on this machine; they do not exist as `kubectl rljob`."""


def report_failure(error: Exception) -> int:
    """Print one of :data:`FAILURES` to stderr; return the exit code."""
    match error:
        case ManifestError():
            report(str(error))
            return 2
        case CliError():
            report(error.sentence)
            if error.log:
                echo(error.log, err=True)
            return error.exit_code
        case Interrupted():
            report(f"{error.checkpoint or 'interrupted'}; the same command resumes the run")
            return 130
        case OSError():
            report(f"{error.filename or 'this machine'}: {error.strerror or error}; correct it and try again")
            return 1
    raise error


@contextlib.contextmanager
def _printable_errors() -> Iterator[None]:
    """Escape control characters of arguments in typer's messages."""
    try:
        yield
    except TyperException as error:
        error.message = escape_block(error.message)
        raise


class _Commands(TyperGroup):
    """The commands. Errors of arguments are reported without the prefix that typer adds."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return [
            name for name in super().list_commands(ctx) if name not in LOCAL_ONLY or not cluster_commands.is_plugin()
        ]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if it does not exist."""
        return super().get_command(ctx, cmd_name) if cmd_name in self.list_commands(ctx) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the named command, and its arguments."""
        if args[0] in LOCAL_ONLY and cluster_commands.is_plugin():
            ctx.fail(f"{args[0]} works on this machine and not in a cluster; write: rljob {args[0]}")
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the arguments before the name of the command."""
        with _printable_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the named command."""
        try:
            with _printable_errors():
                return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="rljob",
    cls=_Commands,
    help="Reinforcement-learning post-training of language models, described by one manifest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        echo(f"rljob {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models, described by one manifest."""


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


app.command(epilog=_examples(
    "rljob run job.yaml",
    "rljob run job.yaml --set spec.training.steps=200 --run-dir runs/longer",
    "rljob run job.yaml --detach",
))(run_control.run)  # fmt: skip
app.command(epilog=_examples(
    "rljob apply job.yaml", "rljob apply job.yaml -n team-a --set spec.training.steps=200 --dry-run",
))(run_control.apply)  # fmt: skip
app.command(epilog=_examples(
    "rljob status", "rljob status sums --watch", "rljob status -o json | jq .state", "rljob status sums -n team-a",
))(status.status)  # fmt: skip
app.command(epilog=_examples(
    "rljob logs", "rljob logs -f trainer", "rljob logs sums trainer runner --tail 50", "rljob logs | grep WARNING",
    "rljob logs -n team-a sums rollout -f",
))(logs.logs)  # fmt: skip
app.command(epilog=_examples("rljob top", "rljob top --count 1", "rljob top sums -o json | jq .components"))(top.top)
app.command(epilog=_examples("rljob stop", "rljob stop sums", "rljob stop --now"))(run_control.stop)
app.command(epilog=_examples("rljob resume sums -n team-a"))(run_control.resume)
app.command(epilog=_examples("rljob validate job.yaml", "rljob validate job.yaml --static"))(manifest.validate)
app.command(epilog=_examples(
    "rljob explain job.yaml", "rljob explain --field spec.training.maxStaleness", "rljob explain --field spec.tasks",
))(manifest.explain)  # fmt: skip
app.command(epilog=_examples(
    "rljob render job.yaml", "rljob render job.yaml --cpu --namespace team-a -o json",
    "rljob render job.yaml --cluster settings.yaml | kubectl diff -f -",
))(manifest.render)  # fmt: skip
app.command(epilog=_examples(
    "rljob simulate job.yaml --engines speeds.yaml",
    "rljob simulate job.yaml --engines speeds.yaml --gpus 16 --trace out.json",
))(simulate.simulate)  # fmt: skip
app.command(epilog=_examples("rljob export model/", "rljob export sums model/ --step 100"))(checkpoint_commands.export)
app.command(epilog=_examples(
    "rljob evaluate", "rljob evaluate sums --step 100 --problems 1000",
    "rljob evaluate --set spec.evaluation.temperature=0.6 -o json",
))(checkpoint_commands.evaluate)  # fmt: skip
app.command(epilog=_examples(
    "rljob samples", "rljob samples sums --step 10 --sort reward --reverse", "rljob samples --limit 1000 -o jsonl",
))(ledger.samples)  # fmt: skip
app.command(epilog=_examples("rljob show g17.3", "rljob show runs/sums g17.3 -o json"))(ledger.show)
app.command(epilog=_examples("rljob audit", "rljob audit runs/sums -o json | jq .checks"))(ledger.audit)
app.add_typer(reward_commands.app, name="reward")
app.add_typer(environment_commands.app, name="env")
