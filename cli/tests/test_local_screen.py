import io
from pathlib import Path

from rich.console import Console

from rljob.local import screen
from rljob.local.screen import LiveScreen, PlainScreen, draw, plain_lines, screen_for
from rljob.local.summary import summary
from rljob.local.view import PartView, View, clock, one_line, sparkline
from rljob.protocol.status import EvaluationResult, HistoryPoint, Metric, PartStatus, Progress, RunStatus


def running(step=2, state="Running", message=""):
    return RunStatus(
        state=state,
        message=message,
        progress=Progress(step, 10, 20.0, 80.0),
        metrics=[Metric("staleness/max", 1.0)],
        evaluations=[EvaluationResult(0, "sums", 0.25, 64, 0.25)],
        history=[HistoryPoint(i, 0.1 + 0.1 * i, 0.5, 4321.0, float(i)) for i in range(step)],
        parts=[PartStatus("agent", "a", "ready", restarts=2)],
    )


def view(**fields):
    parts = [PartView("trainer", "running", 0), PartView("runner", "restarting", 2), PartView("x", "running", 1)]
    return View("sums", Path("runs/sums"), parts=parts, **fields)


def text_of(renderable, width=100):
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_panel_shows_what_a_person_wants_to_know():
    text = text_of(draw(view(status=running()), 100))
    for piece in [
        "sums  runs/sums",
        "2/10  1:20 left",
        "0.200 ▁█",
        "mean 0.50, most 1",
        "4,321 tokens/s",
        "sums 0.250 at version 0",
    ]:
        assert piece in text
    parts = [line.removeprefix("parts").strip() for line in text.splitlines()[-4:]]
    assert parts == ["● trainer", "● runner (2 restarts)", "● x (1 restart)", "engine restarts 2"]


def test_a_cause_of_death_is_wrapped_on_a_terminal_and_whole_in_a_pipe():
    shown = view(status=running())
    shown.parts[1].death = "exited with code 1 (the disk of /mnt/volume/some/where/runs/sums is full)"
    said = f"runner {shown.parts[1].death}"
    lines = text_of(draw(shown, 60), 60).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("died"))
    assert " ".join(" ".join(lines[start:]).removeprefix("died").split()) == said
    piped = list(plain_lines(shown))
    assert piped[-1] == f"died       {said}"
    assert piped[-5:-2] == ["parts      ● trainer", "           ● runner (2 restarts)", "           ● x (1 restart)"]
    assert all(line == line.rstrip() for line in piped)


def test_the_panel_shows_the_phase_and_what_its_log_says_until_the_coordinator_answers():
    text = text_of(draw(View("sums", Path("runs/sums"), phase="running the initializer", detail="x" * 200), 60), 60)
    assert "running the initializer" in text
    assert "xxx…" in text
    assert "reward" not in text
    assert "parts" not in text


def test_the_panel_fits_a_narrow_terminal():
    lines = text_of(draw(view(status=running()), 40), width=40).splitlines()
    assert max(map(len, lines)) <= 40


def plain():
    console = Console(file=io.StringIO(), width=200, markup=False, emoji=False, highlight=False)
    return PlainScreen(console), console.file


def test_plain_lines_come_with_changes_of_state_and_every_few_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    shown, out = plain()
    with shown:
        shown.show(view(phase="starting", began=100.0))
        shown.show(view(status=running(0, "Starting", "waiting for an engine to connect"), began=100.0))
        shown.show(view(status=running(1), began=100.0))
        shown.show(view(status=running(2), began=100.0))  # too soon
        now = 106.0
        shown.show(view(status=running(3), began=100.0))
        now = 112.0
        shown.show(view(status=running(3), began=100.0))  # nothing new
    assert [line.partition("  ")[2] for line in out.getvalue().splitlines()] == [
        "starting",
        "starting: waiting for an engine to connect",
        "step 1/10  reward 0.100  staleness 0.50  4,321 tokens/s  1:20 left  running",
        "step 3/10  reward 0.300  staleness 0.50  4,321 tokens/s  1:20 left  running",
    ]


def test_there_are_no_colours_but_on_a_terminal():
    shown, out = plain()
    shown.note("trainer [bold]was[/] killed :smile:")
    assert out.getvalue() == "trainer [bold]was[/] killed :smile:\n"


def test_a_terminal_gets_the_live_screen_unless_it_is_not_wanted():
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    assert isinstance(screen_for(terminal, live=True), LiveScreen)
    assert isinstance(screen_for(terminal, live=False), PlainScreen)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(screen_for(dumb, live=True), PlainScreen)
    assert isinstance(screen_for(Console(file=io.StringIO()), live=True), PlainScreen)


def test_the_live_screen_draws_and_cleans_up():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with LiveScreen(terminal) as live:
        live.show(view(status=running()))
        live.note("trainer was killed")
    text = terminal.file.getvalue()
    assert "2/10" in text
    assert "trainer was killed" in text
    # The cursor is hidden at first and shown at last; then every line of the panel is erased.
    assert (text.count("\x1b[?25l"), text.count("\x1b[?25h")) == (1, 1) and text.startswith("\x1b[?25l")
    height = text_of(draw(view(status=running()), 80), 80).count("\n")
    assert text.partition("\x1b[?25h")[2] == "\r" + height * "\x1b[1A\x1b[2K"


def test_a_sparkline_spans_lowest_to_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([5, 5, 5], 10) == "▁▁▁"
    assert sparkline([], 10) == ""


def test_durations_are_clocks():
    assert [clock(seconds) for seconds in (0, 65, 3661)] == ["0:00", "1:05", "1:01:01"]


def test_one_line_says_what_is_waited_for():
    line = one_line(view(status=running(0, "Starting", "waiting for the trainer to connect")))
    assert line.endswith("starting: waiting for the trainer to connect")


def test_the_summary_of_one_evaluation_claims_no_gain(tmp_path):
    assert "held-out accuracy of sums: 0.250 on 64 problems" in summary(running(), tmp_path)
