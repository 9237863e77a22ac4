"""No command writes control characters of models, rewards, logs, files or arguments to the terminal."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pty
import re
import sqlite3
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from ledgers import batch_of, copy, set_text
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from rljob.api.job_status import CheckpointStatus, EndedSamples, EvaluationResult, Metric, Progress, Queue
from rljob.cli.main import main
from rljob.cli.options import echo
from rljob.cli.typer_app import app
from rljob.local.screen import LiveScreen, PlainScreen, Terminal
from rljob.local.snapshot import ComponentState, RunSnapshot
from rljob.local.snapshot_view import draw_usage, evaluation_table, plain_lines, summary
from rljob.protocol.run_status import ComponentStatus, HistoryPoint, RunStatus, encode_status
from rljob.remote.job import job_snapshot

CONTROLS = "".join(map(chr, [*range(1, 0x20), *range(0x7F, 0xA0)]))
HOSTILE = f"[bold][/][/x]\x1b]0;title\x07\x1b[2J\x9b1A\u202e\u200b\u2028{CONTROLS}end"
SURROGATE = f"{HOSTILE}\udc80"
RICH_CODES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r?\x1b\[1A|\r?\x1b\[2K")
"""Written by rich: styles, and the cursor and erased lines of the live display. The hostile text has none of them."""


def assert_printable(output: str) -> None:
    bad = {ascii(x) for x in output if unicodedata.category(x) in ("Cc", "Cf", "Cs", "Zl", "Zp") and x not in "\n\t"}
    assert not bad, bad


def status() -> RunStatus:
    return RunStatus(
        state="Succeeded",
        message=HOSTILE,
        progress=Progress(5, 5, HOSTILE[:60]),
        last_checkpoint=CheckpointStatus(5, f"checkpoints/{HOSTILE}"),
        queues=[Queue(HOSTILE[:60], 1)],
        ended=EndedSamples(trained=1, failed=9, filtered=9, last_failure=HOSTILE),
        metrics=[Metric(f"seconds_{HOSTILE[:50]}", 1.0)],
        evaluations=[EvaluationResult(v, HOSTILE, 0.5, 2, 0.5, 1, HOSTILE) for v in (0, 5)],
        history=[HistoryPoint(0, 0.5, 0.0, 1.0, 1.0)],
        components=[ComponentStatus(role, HOSTILE, HOSTILE, 1, HOSTILE) for role in ("agent", "trainer")],
    )


def snapshot() -> RunSnapshot:
    components = [ComponentState(SURROGATE, SURROGATE, 1, SURROGATE, SURROGATE)]
    place = {"directory": SURROGATE}
    return RunSnapshot(
        place, SURROGATE, True, "running", SURROGATE, status(), components, 1.0, detail=SURROGATE, note=SURROGATE
    )


@pytest.fixture(scope="module")
def hostile_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile text in all columns and files that a model, a reward or a component writes."""
    run = copy(finished_run, tmp_path_factory.mktemp("hostile") / f"run{HOSTILE.replace('/', '')}")
    db = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    db.execute("UPDATE samples SET reason = ?1, finish = ?1", (HOSTILE,))
    db.execute("UPDATE samples SET metrics = ?", (json.dumps({HOSTILE: 1}),))
    db.execute("UPDATE samples SET state = 'failed' WHERE id LIKE '%.0' AND state = 'filtered'")
    db.execute("UPDATE groups SET task = ? WHERE seq = 1", (HOSTILE,))
    db.execute("UPDATE completions SET engine = ?1, finish = ?1", (HOSTILE,))
    db.execute("UPDATE publications SET digest = ? WHERE step = 4", (HOSTILE,))
    db.close()
    set_text(run, HOSTILE)
    tokenizer = models.WordLevel({f"{HOSTILE}{i}": i for i in range(2**10)}, unk_token=f"{HOSTILE}0")
    Tokenizer(tokenizer).save(str(run / "model" / "tokenizer.json"))
    (run / "status.json").write_bytes(encode_status(status()))
    restart = {"time": 1.0, "subject": SURROGATE, "event": "restarting", "code": 1, "cause": SURROGATE}
    failed = {"time": 2.0, "subject": "run", "event": "failed", "message": SURROGATE}
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (restart, failed)))
    (run / "logs").mkdir()
    for name in ("trainer", SURROGATE.replace("/", "")):
        (run / "logs" / f"{name}.log").write_bytes(HOSTILE.encode() + b"\xff\xfe\nlast\n")
    return run


@pytest.fixture
def rljob(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., str]:
    """Run a command in this process; return stdout and stderr. A program that takes the place of this process runs in
    it."""

    def execve(_: str, command: list[str], environment: dict[str, str]) -> None:
        assert command[1] == "-m"
        monkeypatch.setattr(sys, "argv", command[2:])
        monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest, which it adds after the fixtures
        monkeypatch.setattr(sys, "path", [environment["PYTHONPATH"], *sys.path])
        importlib.invalidate_caches()
        try:
            importlib.import_module(command[2]).main()
        except Exception as error:  # noqa: BLE001 the end of a process
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
        finally:
            sys.modules.pop("hostile_code", None)

    monkeypatch.setattr(os, "execve", execve)

    def command(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["rljob", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code in (None, 0, 1, 2, 3)
        captured = capfdbinary.readouterr()
        output = (captured.out + captured.err).decode()
        assert "Traceback" not in output or not UNEXPECTED.isdisjoint(arguments)
        return output

    return command


COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "run": [("FILE",), ("FILE", "--set", SURROGATE), (SURROGATE,)],
    "apply": [("FILE", "--set", f"{SURROGATE}=1"), ("FILE", "--context", SURROGATE)],
    "status": [("RUN",), ("RUN", "-o", "json"), ("RUN", "--watch"), (SURROGATE,), ("-n", SURROGATE)],
    "logs": [("RUN",), ("RUN", "trainer"), ("RUN", "-o", "json"), ("RUN", SURROGATE * 2)],
    "top": [("RUN",)],
    "stop": [("RUN",), (SURROGATE,)],
    "resume": [(SURROGATE, "-n", "x")],
    "validate": [("FILE",), ("VALID", "--static"), (SURROGATE,)],
    "explain": [("VALID",), ("--field", f"spec.{SURROGATE}"), ("FILE",)],
    "render": [("VALID",), ("VALID", "-o", "json"), ("VALID", "--cluster", SURROGATE)],
    "export": [("RUN", "FILE"), (SURROGATE, "other", SURROGATE)],
    "evaluate": [("RUN",), ("RUN", "--set", SURROGATE)],
    "samples": [
        ("RUN",),
        ("RUN", "--group", SURROGATE),
        ("RUN", "--state", "failed"),
        ("RUN", "-o", "json"),
        ("RUN", "-o", "jsonl"),
        ("RUN", "--task", SURROGATE),
        ("RUN", "--state", SURROGATE),
        (f"--{SURROGATE}",),
    ],
    "show": [("RUN", "SAMPLE"), ("RUN", "OLD"), ("RUN", "SAMPLE", "-o", "json"), ("RUN", SURROGATE)],
    "audit": [("RUN",), ("RUN", "-o", "json")],
    "simulate": [("FILE", "--engines", SURROGATE), ("VALID", "--engines", "VALID")],
    "reward": [
        ("new", SURROGATE),
        ("serve", "hostile_code:FailingInit"),
        ("serve", "hostile_code:FailingSignature"),
        ("serve", "hostile_code:absent"),
        ("serve", SURROGATE),
        ("check", "RUN"),
        ("check", "RUN", "--reward", SURROGATE),
        ("check", "RUN", "--function", SURROGATE),
        ("check", "RUN", "--function", "hostile_code:absent"),
        ("check", SURROGATE),
    ],
    "env": [
        ("new", SURROGATE),
        *(
            (command, environment)
            for command in ("check", "play")
            for environment in (
                "hostile_code:FailingInit",
                "hostile_code:FailingReset",
                "hostile_code:absent",
                SURROGATE,
            )
        ),
        ("check", "hostile_code:FailingInit", "-o", "json"),
        ("check", "hostile_code:FailingReset", "--config", SURROGATE),
        ("play", "hostile_code:FailingAttribute"),
        ("serve", "hostile_code:absent"),
        ("serve", SURROGATE),
    ],
}
UNEXPECTED = {"hostile_code:FailingAttribute", "hostile_code:FailingSignature"}
"""Code whose exceptions nothing catches: their tracebacks are printed, escaped."""
HOSTILE_CODE = f"""
TEXT = {HOSTILE!r}

class FailingReset:
    def reset(self, seed, row):
        raise RuntimeError(TEXT)

    def step(self, action):
        raise RuntimeError(TEXT)

    def __call__(self, completion):
        raise RuntimeError(TEXT)

class FailingInit(FailingReset):
    def __init__(self):
        raise RuntimeError(TEXT)

class FailingAttribute(FailingReset):
    def __getattr__(self, name):
        raise RuntimeError(TEXT)

class FailingSignature(FailingReset):
    @property
    def __signature__(self):
        raise RuntimeError(TEXT)

def __getattr__(name):
    raise RuntimeError(TEXT)
"""


def test_every_command_has_cases() -> None:
    commands: dict[str, Any] = typer.main.get_group(app).commands
    assert COMMANDS.keys() == commands.keys()
    for name in ("reward", "env"):
        assert {case[0] for case in COMMANDS[name]} == commands[name].commands.keys()


def test_only_the_functions_that_escape_write_to_the_terminal() -> None:
    assert writes_of("cli") == [
        ("options.py", "typer.echo(escape_block(text), err=err, nl=nl)"),
        ("options.py", "typer.echo(escape_json(document if isinstance(document, str) else document.decode()))"),
        ("background.py", 'sys.stderr.write(escape_block(data.decode(errors="replace")))'),
    ]
    services = [*writes_of("env-services"), *writes_of("reward-services")]
    assert [write for write in services if not re.search(r"\((f\"\{)?escape_(line|block|json)\(", write[1])] == [
        ("demonstrations.py", 'sys.stdout.write(json.dumps(episode) + "\\n")'),  # data, for a file
        ("play.py", 'sys.stdout.write(f"reward of the episode: {total:g}\\n")'),
        ("play.py", 'sys.stdout.write("action> ")'),
        ("play.py", 'sys.stdout.write("\\n")'),
        ("session_openapi.py", 'sys.stdout.write(json.dumps(document(), indent=1) + "\\n")'),
        ("openapi.py", 'sys.stdout.write(json.dumps(document(), indent=1) + "\\n")'),
        ("run_roles.py", "print(*map(int, input().split()))"),  # of a program in the sandbox
        ("run_roles.py", 'print(end="", flush=True)'),
    ]


def writes_of(folder: str) -> list[tuple[str, str]]:
    """Return (name of the file, line) of each line that writes to the terminal."""
    sources = Path(__file__).resolve().parents[2] / folder / "src" / "rljob"
    writes = re.compile(
        r"typer\.echo\(|(?<!\w)print\(|std(out|err)\.(buffer\.)?write(lines)?\(|(?<!\w)Console\(|secho\(|print_exc"
    )
    return [
        (path.name, line.strip())
        for path in sorted(sources.rglob("*.py"))
        for line in path.read_text().splitlines()
        if writes.search(line) and ".print(" not in line and "def " not in line
    ]


@pytest.mark.parametrize("terminal", ["", "xterm-256color"])
@pytest.mark.parametrize(("name", "arguments"), [(name, case) for name in COMMANDS for case in COMMANDS[name]])
def test_no_control_character_of_a_run_or_of_an_argument_reaches_the_output(
    name: str,
    arguments: tuple[str, ...],
    terminal: str,
    rljob: Callable[..., str],
    hostile_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", terminal)
    (tmp_path / "hostile_code.py").write_text(HOSTILE_CODE, "utf-8")
    manifest = json.loads((hostile_run / "job.json").read_bytes())
    (tmp_path / "valid").write_text(json.dumps({**manifest, "spec": {**manifest["spec"], "image": HOSTILE}}))
    manifest["spec"]["tasks"][0]["prompt"] = manifest["spec"]["tasks"][0][HOSTILE] = HOSTILE
    (tmp_path / "file").write_text(json.dumps(manifest))
    words = {
        "RUN": str(hostile_run),
        "FILE": str(tmp_path / "file"),
        "VALID": str(tmp_path / "valid"),
        "SAMPLE": batch_of(hostile_run, 5)[0],
        "OLD": batch_of(hostile_run, 0)[0],
    }
    output = rljob(name, *(words.get(word, word) for word in arguments))
    assert_printable(RICH_CODES.sub("", output) if terminal else output)
    assert output


def test_json_of_hostile_text_is_exact(rljob: Callable[..., str], hostile_run: Path) -> None:
    rows = json.loads(rljob("samples", hostile_run, "-o", "json"))
    assert {row["text"] for row in rows} == {HOSTILE}
    shown = json.loads(rljob("show", hostile_run, batch_of(hostile_run, 5)[0], "-o", "json"))
    assert shown["turns"][0]["completions"][0]["engine"] == HOSTILE
    assert json.loads(rljob("status", hostile_run, "-o", "json"))["message"] == SURROGATE
    assert json.loads(rljob("logs", hostile_run, "trainer", "-o", "json").splitlines()[0])["line"].startswith("[bold]")


def test_markup_is_printed_literally(rljob: Callable[..., str], hostile_run: Path) -> None:
    for command in (("samples",), ("show", "SAMPLE"), ("status",), ("logs", "trainer")):
        words = [batch_of(hostile_run, 5)[0] if word == "SAMPLE" else word for word in command]
        assert r"[bold][/][/x]\x1b]0;title\x07\x1b[2J\x9b1A\u202e\u200b\u2028" in rljob(
            words[0], hostile_run, *words[1:]
        )


def test_the_screens_of_a_run_print_no_control_character(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown, console = snapshot(), Terminal()
    for screen in (PlainScreen(console), LiveScreen(console)):
        with screen:
            screen.show(shown)
            screen.note(SURROGATE)
    drawn = capfdbinary.readouterr().out.decode()
    assert r"\x1b]0;title\x07" in drawn
    assert_printable(RICH_CODES.sub("", drawn))
    console.print(draw_usage(shown))
    console.print(evaluation_table(5, status().evaluations))
    for line in (*plain_lines(shown), *summary(shown)):
        echo(line)
    assert_printable(RICH_CODES.sub("", capfdbinary.readouterr().out.decode()))


def test_conditions_and_roles_of_an_rljob_print_no_control_character(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    role = {"name": SURROGATE, "ready": 0, "desired": 1, "summary": SURROGATE, "restarts": 1, "lastExit": SURROGATE}
    condition = {"type": "Ready", "status": "False", "reason": "Starting", "message": SURROGATE}
    body = {
        "metadata": {"name": SURROGATE, "creationTimestamp": "2026-01-31T12:00:00Z"},
        "spec": {},
        "status": {"conditions": [condition], "roles": [role]},
    }
    where: Any = SimpleNamespace(name=SURROGATE, api=SimpleNamespace(access=SimpleNamespace(context=SURROGATE)))
    shown = job_snapshot(where, body, status(), SURROGATE)
    Terminal().print(draw_usage(shown))
    for line in plain_lines(shown):
        echo(line)
    assert_printable(capfdbinary.readouterr().out.decode())


def test_completion_offers_no_name_with_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "with\x1b[2J"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.json").touch()
    environment = {"_RLJOB_COMPLETE": "complete_bash", "COMP_WORDS": "rljob status ", "COMP_CWORD": "2"}
    assert CliRunner().invoke(app, [], prog_name="rljob", env=environment).output.split() == ["plain"]


def test_a_real_terminal_gets_styles_and_no_other_control_character(hostile_run: Path) -> None:
    reading, writing = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    command = [sys.executable, "-m", "rljob.cli.main", "samples", str(hostile_run), "--limit", "3"]
    process = subprocess.Popen(command, stdout=writing, stderr=writing, env=environment)
    os.close(writing)
    output = b""
    while True:
        try:
            output += os.read(reading, 65536)
        except OSError:  # the terminal is closed: the process has ended
            break
    os.close(reading)
    assert process.wait() == 0
    text = output.decode().replace("\r\n", "\n")
    assert RICH_CODES.search(text) and "[bold]" in text
    assert_printable(RICH_CODES.sub("", text))
