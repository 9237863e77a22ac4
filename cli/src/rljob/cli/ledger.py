"""Commands that read a run's ledger: samples, show, audit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from rljob.api.text_escape import escape_block, escape_line
from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import RUN_HELP, Format, Output, RunName, complete_runs, echo, echo_json, report
from rljob.ledger.audit import Report
from rljob.ledger.audit import audit as audit_run
from rljob.ledger.failed_samples import failed_note
from rljob.ledger.reader import (
    MOST_SAMPLES,
    LedgerReader,
    NoRunError,
    SampleRow,
    Selection,
    Sort,
    unknown_task,
    why_empty,
)
from rljob.ledger.reader import samples as select_samples
from rljob.ledger.sample_detail import AnswerDetail, SampleDetail, TokenDetail, TurnDetail
from rljob.ledger.sample_detail import show as load_sample
from rljob.ledger.states import Kind, State
from rljob.ledger.store import LEDGER, ledger_directory
from rljob.local import checkpoints, find_run
from rljob.local.errors import CliError
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import Terminal
from rljob.local.snapshot import initializing

MAX_TEXT_CHARACTERS = 80
MAX_REASON_CHARACTERS = 500
STYLES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Lower bound of a token's probability when it was sampled → colour on a terminal."""

COLUMNS = (
    "sample", "task", "state", "step", "reward", "advantage", "tokens", "versions", "staleness", "finish", "text",
)  # fmt: skip
DROPPED_FIRST = ("versions", "staleness", "advantage", "task", "tokens", "state", "step")
"""Columns that a narrow terminal omits, in this order."""
MIN_TEXT_WIDTH, MIN_REASON_WIDTH = 24, 48  # terminal columns that are reserved for the text, or for a reason
COLUMN_GAP = 2


class ListFormat(StrEnum):
    """Format of a list."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


@contextlib.contextmanager
def _open_run(name: str | None) -> Iterator[Path]:
    """Yield the directory of the run called ``name``; NoRunError in the body, and an argument that is not UTF-8, become
    a CliError with exit code 2."""
    directory = find_run.find(name)
    if not (ledger_directory(directory.path) / LEDGER).exists():
        raise CliError(f"the run in {directory.path} has no ledger yet: {_no_ledger_reason(directory)}", 2)
    try:
        yield directory.path
    except NoRunError as error:
        raise CliError(str(error), 2) from None
    except UnicodeEncodeError as error:  # an argument that the ledger cannot be asked for
        raise CliError(f"{error.object!r} is not UTF-8; no name in a ledger is like this", 2) from None


def _no_ledger_reason(directory: RunDirectory) -> str:
    if not directory.running():
        return "it has not started; rljob run starts it"
    return f"{'its initializer runs' if initializing(directory) else 'it is starting'}; try again when it trains"


def samples(
    run: RunName = None,
    task: Annotated[str | None, typer.Option("--task", help="Only samples of this task.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only samples of this batch.")] = None,
    state: Annotated[State | None, typer.Option("--state", help="Only samples in this state.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Only samples of this group, for example g17.")] = None,
    kind: Annotated[Kind | None, typer.Option("--kind", help="Only training or only evaluation samples.")] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Sort by this, newest or largest first.")] = Sort.NEWEST,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of samples.")] = 20,
    output: Annotated[
        ListFormat, typer.Option("-o", "--output", help="A table, one JSON array, or one JSON object per line.")
    ] = ListFormat.TEXT,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """List samples of a run, also while it is running."""
    selection = Selection(task, step, state, group, kind, sort, reverse, limit)
    if cluster_commands.targets_cluster(context, namespace):
        if limit > MOST_SAMPLES:
            raise CliError(f"--limit: at most {MOST_SAMPLES:,} samples of a job in a cluster, not {limit:,}", 2)
        query = {name: _query_value(value) for name, value in dataclasses.asdict(selection).items()}
        coordinator = cluster_commands.find(run, context, namespace).coordinator
        rows, note = coordinator.ask("/v1/samples", list[SampleRow], **query)
    else:
        rows, note = _local_samples(run, selection)
    if note:
        report(note)
    if output is ListFormat.JSON:
        echo_json(msgspec.json.encode(rows))
    elif output is ListFormat.JSONL:
        for row in rows:
            echo_json(msgspec.json.encode(row))
    else:
        _print_table([_cells(row) for row in rows])


def _query_value(value: object) -> object:
    """Return an argument in the format of a URL query."""
    return str(value).lower() if isinstance(value, bool) else value


def _local_samples(run: str | None, selection: Selection) -> tuple[list[SampleRow], str]:
    """Return samples of a local run, and a note: the reason if there are none; of failed samples, how many there
    are."""
    with _open_run(run) as path, LedgerReader(path) as ledger:
        if problem := unknown_task(ledger, selection):
            raise CliError(problem, 2)
        rows = select_samples(ledger, selection)
        return rows, failed_note(ledger, selection, len(rows)) if rows else why_empty(ledger, selection)


def _cells(row: SampleRow) -> list[str]:
    numbers = [_number(value) for value in (row.step, row.reward, row.advantage, row.response_tokens)]
    cells = [row.id, row.task, row.state, *numbers, _versions(row), _number(row.staleness), row.finish or ""]
    return [*map(escape_line, cells), _text(row)]


def _text(row: SampleRow) -> str:
    """Return the start of the last answer; of a failed sample, the reason."""
    if row.state == State.FAILED or not row.text:
        return escape_line(row.reason[:MAX_REASON_CHARACTERS])
    return _one_line(row.text[:MAX_TEXT_CHARACTERS])


def _versions(row: SampleRow) -> str:
    same = row.min_version == row.max_version
    return _number(row.min_version) if same else f"{_number(row.min_version)}-{_number(row.max_version)}"


def _print_table(rows: list[list[str]]) -> None:
    """Print a table cut to the terminal's width, or tab-separated lines when piped. In a list of failed samples the
    reasons are wrapped, not cut."""
    console = Terminal()
    if not console.is_terminal:
        for row in [list(COLUMNS), *rows]:
            echo("\t".join(row))
        return
    reasons = bool(rows) and all(row[COLUMNS.index("state")] == State.FAILED for row in rows)
    *columns, text = _columns_that_fit(rows, console.width, MIN_REASON_WIDTH if reasons else MIN_TEXT_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(COLUMNS[column], no_wrap=True, overflow="ellipsis", width=_width(rows, column))
    # Without a width, rich narrows all columns to make room for a long text, some of them to nothing.
    rest = console.width - sum(_width(rows, column) + COLUMN_GAP for column in columns)
    width = max(len(COLUMNS[text]), min(rest, _width(rows, text)))
    table.add_column(COLUMNS[text], no_wrap=not reasons, overflow="fold" if reasons else "ellipsis", width=width)
    columns.append(text)
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    console.print(table)


def _columns_that_fit(rows: list[list[str]], width: int, least: int) -> list[int]:
    """Return the columns that leave ``least`` columns of a terminal ``width`` wide for the texts."""
    columns = [i for i, name in enumerate(COLUMNS) if name == "text" or any(row[i] for row in rows)]
    text = min(least, _width(rows, len(COLUMNS) - 1))
    for name in DROPPED_FIRST:
        if sum(_width(rows, column) + COLUMN_GAP for column in columns[:-1]) + text <= width:
            break
        columns = [column for column in columns if COLUMNS[column] != name]
    return columns


def _width(rows: list[list[str]], column: int) -> int:
    return max(cell_len(row[column]) for row in [list(COLUMNS), *rows])


def show(
    names: Annotated[list[str], typer.Argument(metavar="[RUN] SAMPLE", help=RUN_HELP, autocompletion=complete_runs)],
    only_turns: Annotated[
        bool, typer.Option("--turns", help="Only the turns: observation, answer, reward, policy versions.")
    ] = False,
    output: Output = Format.TEXT,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Show one sample of a run: its tokens with log-probabilities and policy versions, its reward, its group."""
    if len(names) > 2:
        raise CliError("give a run and one sample, for example: rljob show runs/sums g17.3", 2)
    run = names[0] if len(names) == 2 else None
    if cluster_commands.targets_cluster(context, namespace):
        coordinator = cluster_commands.find(run, context, namespace).coordinator
        detail, _ = coordinator.ask(f"/v1/samples/{names[-1]}", SampleDetail)
    else:
        detail = _local_sample(names)
    if output is Format.JSON:
        echo_json(msgspec.json.encode(detail))
        return
    lines = _sample_lines(detail)
    if only_turns:
        turns = (_turn(turn, table=False) for turn in detail.turns)
        lines = itertools.chain(itertools.chain.from_iterable(turns), _answers(detail.answers))
        for note in detail.notes:
            report(note)
    _print_lines(lines)


def _local_sample(names: list[str]) -> SampleDetail:
    """Return a sample of a local run."""
    if len(names) == 1 and find_run.exists(names[0]):
        raise CliError(f"give a sample of that run too, for example: rljob show {names[0]} g17.3", 2)
    with _open_run(names[0] if len(names) == 2 else None) as path, LedgerReader(path) as ledger:
        return load_sample(ledger, names[-1])


def _print_lines(lines: Iterable[Text]) -> None:
    """Print lines, with colours on a terminal."""
    console = Terminal()
    for line in lines:
        if console.is_terminal:
            console.print(line, soft_wrap=True)
        else:
            echo(line.plain)


def _sample_lines(detail: SampleDetail) -> Iterator[Text]:
    """Yield the lines that describe a sample."""
    sample = detail.sample
    where = f" in batch {sample.step}" if sample.step is not None else ""
    ended = f"{sample.state}{where}{f': {sample.reason}' if sample.reason else ''}"
    yield Text.assemble((sample.id, "bold"), f"  {escape_line(ended)}")
    staleness = "" if sample.staleness is None else f", staleness {sample.staleness}"
    fields = {
        "task": f"{sample.task}, row {sample.row} of its {'held-out ' * (sample.kind == Kind.EVALUATION)}data",
        "reward": _number(sample.reward),
        "advantage": _number(sample.advantage),
        "metrics": ", ".join(f"{name} {_number(value)}" for name, value in detail.metrics.items()),
        "tokens": _tokens(sample),
        "versions": sample.min_version is not None and f"{_versions(sample)}{staleness}",
        "end": sample.finish,
        "attempt": detail.attempt and f"{detail.attempt}: earlier completions were discarded",
    }
    for name, value in fields.items():
        if value:
            yield _field(name, value)
    for i, sibling in enumerate(detail.siblings):
        text = f"{sibling.id}  {sibling.state}  reward {_number(sibling.reward)}"
        advantage = "" if sibling.advantage is None else f"  advantage {_number(sibling.advantage)}"
        yield _field(f"group {sample.group}" if i == 0 else "", f"{text}{advantage}")
    for note in detail.notes:
        yield _field("note", note)
    for turn in detail.turns:
        yield from _turn(turn, summary=len(detail.turns) > 1)
    yield from _answers(detail.answers)
    if sample.text is not None and not any(turn.written for turn in detail.turns):
        yield _title("answer")
        yield Text(escape_block(sample.text))


def _tokens(sample: SampleRow) -> str:
    prompt, response, total = (
        value or 0 for value in (sample.prompt_tokens, sample.response_tokens, sample.total_tokens)
    )
    if sample.sequences is not None:
        lengths = ", ".join(map(_number, sample.sequences))
        return f"{_number(response)} response, {len(sample.sequences)} sequences of {lengths} tokens"
    observation = max(0, total - prompt - response)
    observations = f", {_number(observation)} observation" if observation else ""
    return f"{_number(prompt)} prompt, {_number(response)} response{observations}"


def _turn(turn: TurnDetail, summary: bool = True, table: bool = True) -> Iterator[Text]:
    """Yield the lines that describe a turn. ``summary``: with reward and versions. ``table``: with a line for each
    token."""
    branch = f"branch {turn.branch}, " if turn.branch else ""
    for completion in turn.completions:
        text = f"attempt {completion.attempt} on {completion.engine or 'an engine that is gone'}"
        yield _field(f"turn {turn.turn}", f"{branch}{text}: {completion.tokens} tokens, {completion.finish}")
    if summary and (text := _summary(turn)):
        yield _field("", text)
    if turn.given_ids:
        yield _title("prompt" if turn.turn == 0 else "observation")
        yield Text(escape_block(turn.given) if turn.given is not None else " ".join(map(str, turn.given_ids)))
    if not turn.written:
        return
    if turn.given is not None:
        yield _title("answer")
        yield Text.assemble(*((escape_block(token.text or ""), _style(token)) for token in turn.written))
    if not table:
        return
    yield _title("index  token  log-probability  probability  version  text")
    for i, token in enumerate(turn.written):
        numbers = f"{i:5}  {token.id:5}  {token.logprob:15.6f}  {math.exp(token.logprob):11.4f}  {token.version:7}"
        yield Text.assemble(f"{numbers}  ", (_one_line(token.text or ""), _style(token)))


def _answers(answers: list[AnswerDetail]) -> Iterator[Text]:
    """Yield the lines that describe answers of frozen pools."""
    for answer in answers:
        branch = f"branch {answer.branch}, " if answer.branch else ""
        yield _field("answer", f"of pool {answer.pool} {branch}before turn {answer.turn}: {answer.finish}")
        yield Text(
            escape_block("it cannot be read; rljob audit names the damage" if answer.text is None else answer.text)
        )


def _summary(turn: TurnDetail) -> str:
    """Return reward and policy versions of a turn, as far as they are known."""
    versions = sorted({token.version for token in turn.written})
    parts = [f"reward {_number(turn.reward)}"] if turn.reward is not None else []
    if versions:
        parts.append(f"versions {'-'.join(map(str, dict.fromkeys((versions[0], versions[-1]))))}")
    return ", ".join(parts)


def _style(token: TokenDetail) -> str:
    return next((style for least, style in STYLES if math.exp(token.logprob) >= least), "")


def _field(name: str, value: str) -> Text:
    return Text.assemble((f"{name:10} ", "dim"), escape_line(value))


def _title(name: str) -> Text:
    return Text.assemble("\n", (name, "bold"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _one_line(text: str) -> str:
    """Return a text of the model on one line; backslashes are doubled, so that it differs from escapes."""
    return escape_line(text.replace("\\", "\\\\"))


def audit(
    run: RunName = None, output: Output = Format.TEXT, context: Context = None, namespace: Namespace = None
) -> None:
    """Check with the ledger that no sample of a run was lost, duplicated or mixed up.

    The run may be running; otherwise checkpoints that its directory lacks are first downloaded from
    spec.checkpoints.uri. Exit code: 0 when all checks are ok, 1 when one failed.
    """
    if cluster_commands.targets_cluster(context, namespace):
        found, _ = cluster_commands.find(run, context, namespace).coordinator.ask("/v1/audit", Report)
    else:
        with _open_run(run) as path:
            checkpoints.fetch_missing(RunDirectory(path))
            found = audit_run(path)
    if output is Format.JSON:
        echo_json(msgspec.json.encode(found))
    else:
        _print_lines(_audit_lines(found))
    raise typer.Exit(0 if found.ok else 1)


def _audit_lines(found: Report) -> Iterator[Text]:
    """Yield the lines that describe an audit."""
    yield Text(", ".join(f"{count} {name}" for name, count in found.counts.items()))
    for check in found.checks:
        label = ("ok      ", "green") if check.ok else ("FAILED  ", "bold red")
        yield Text.assemble(
            label, escape_line(f"{check.name} ({'; '.join(filter(None, (f'{check.examined} examined', check.note)))})")
        )
        for problem in check.problems:
            yield Text(f"        {escape_line(problem)}")
    failed = sum(not check.ok for check in found.checks)
    result = f"{failed} {'check' if failed == 1 else 'checks'} failed" if failed else "all checks ok"
    yield Text(f"{result}{'' if found.finished else '; the run is not finished; open samples are not errors'}")
