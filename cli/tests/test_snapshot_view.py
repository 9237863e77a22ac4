import io
import itertools

from rich.console import Console

from rljob.api.job_status import EndedSamples, EvaluationResult, Metric, PassRate, Progress, Queue
from rljob.local import screen
from rljob.local.plot import draw_plot
from rljob.local.process_usage import Usage
from rljob.local.screen import LiveScreen, PlainScreen, screen_for
from rljob.local.snapshot import ComponentState, RunSnapshot
from rljob.local.snapshot_view import (
    clock,
    draw,
    draw_usage,
    evaluation_table,
    one_line,
    plain_lines,
    sparkline,
    summary,
)
from rljob.protocol.run_status import ComponentStatus, HistoryPoint, RunStatus


def running(step=2, state="Running", message=""):
    return RunStatus(
        state=state,
        message=message,
        progress=Progress(step, 10, seconds=20.0, eta_seconds=80.0),
        metrics=[Metric("staleness/max", 1.0)],
        evaluations=[EvaluationResult(0, "sums", 0.25, 64, 0.25)],
        history=[HistoryPoint(i, 0.1 + 0.1 * i, 0.5, 4321.0, float(i)) for i in range(step)],
        components=[ComponentStatus("agent", "a", "ready", restarts=2)],
    )


def snapshot(status=None, state="starting", message="", directory="runs/sums", **fields):
    if status is not None:
        state, message = status.state.lower(), status.message
    components = [
        ComponentState("trainer", "running", 0),
        ComponentState("runner", "restarting", 2),
        ComponentState("x", "running", 1),
    ]
    fields = {"components": components} | fields
    return RunSnapshot({"directory": str(directory)}, "sums", True, state, message, status, **fields)


def text_of(renderable, width=100):
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    console.print(renderable)
    return console.file.getvalue()


def test_the_panel_shows_what_a_person_wants_to_know():
    text = text_of(draw(snapshot(running()), 100))
    for piece in [
        "sums  runs/sums",
        "2/10  1:20 left",
        "0.200 ▁█",
        "mean 0.50, most 1",
        "4,321 tokens/s",
        "sums 0.250 at version 0",
    ]:
        assert piece in text
    components = [line.removeprefix("components").strip() for line in text.splitlines()[-4:]]
    assert components == ["● trainer", "● runner (2 restarts)", "● x (1 restart)", "engine of a (2 restarts)"]


def test_warnings_of_the_coordinator_are_on_every_screen_and_in_the_summary():
    status = running()
    status.warnings = [f"lineage {n} starts at version {n}" for n in range(1, 8)]
    shown = snapshot(status)
    lines = [line for line in plain_lines(shown) if line.startswith("warning")]
    assert lines == [f"warning    {warning}" for warning in status.warnings[-4:]], "the newest"
    assert "lineage 7 starts at version 7" in text_of(draw(shown, 100))
    assert [line for line in summary(shown) if "lineage" in line] == [f"warning: {w}" for w in status.warnings[-4:]]


def test_a_cause_of_death_is_wrapped_on_a_terminal_and_whole_in_a_pipe():
    shown = snapshot(running())
    shown.components[1].last_exit = "exited with code 1 (the disk of /mnt/volume/some/where/runs/sums is full)"
    said = f"runner {shown.components[1].last_exit}"
    lines = text_of(draw(shown, 60), 60).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("exited"))
    end = next(i for i, line in enumerate(lines) if line.startswith("components"))
    assert " ".join(" ".join(lines[start:end]).removeprefix("exited").split()) == said
    piped = list(plain_lines(shown))
    assert piped[-5] == f"exited     {said}"
    assert piped[-4:-1] == ["components ● trainer", "           ● runner (2 restarts)", "           ● x (1 restart)"]
    assert all(line == line.rstrip() for line in piped)


def test_the_panel_shows_the_phase_and_what_its_log_says_until_the_coordinator_answers():
    text = text_of(draw(snapshot(state="running the initializer", detail="x" * 200, components=[]), 60), 60)
    assert "running the initializer" in text
    assert "xxx…" in text
    assert "reward" not in text
    assert "components" not in text


def test_the_panel_fits_a_narrow_terminal():
    lines = text_of(draw(snapshot(running()), 40), width=40).splitlines()
    assert max(map(len, lines)) <= 40


def plain():
    console = Console(file=io.StringIO(), width=200, markup=False, emoji=False, highlight=False)
    return PlainScreen(console), console.file


def test_plain_lines_come_with_changes_of_state_and_every_few_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    shown, out = plain()
    with shown:
        shown.show(snapshot(state="starting"))
        shown.show(snapshot(running(0, "Starting", "waiting for an engine to connect")))
        shown.show(snapshot(running(1)))
        shown.show(snapshot(running(2)))  # too soon
        now = 106.0
        shown.show(snapshot(running(3)))
        now = 112.0
        shown.show(snapshot(running(3)))  # nothing new
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
        live.show(snapshot(running()))
        live.note("trainer was killed")
    text = terminal.file.getvalue()
    assert "2/10" in text
    assert "trainer was killed" in text
    # The cursor is hidden at first and shown at last; then every line of the panel is erased.
    assert (text.count("\x1b[?25l"), text.count("\x1b[?25h")) == (1, 1) and text.startswith("\x1b[?25l")
    height = text_of(draw(snapshot(running()), 80), 80).count("\n")
    assert text.partition("\x1b[?25h")[2] == "\r" + height * "\x1b[1A\x1b[2K"


def test_a_sparkline_spans_lowest_to_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([5, 5, 5], 10) == "▁▁▁"
    assert sparkline([], 10) == ""


def test_top_shows_the_usage_of_each_component_and_a_dash_where_it_is_unknown():
    shown = snapshot(running(), note="one is not measured yet")
    shown.components[0].usage = Usage(3, 1.5, 2 << 30)
    lines = text_of(draw_usage(shown)).splitlines()
    rows = [line.split() for line in lines]
    assert ["component", "state", "cpu", "%", "memory", "processes", "restarts"] in rows
    assert ["trainer", "running", "150", "2,048", "MiB", "3", "0"] in rows
    assert ["runner", "restarting", "–", "–", "–", "2"] in rows
    assert "one is not measured yet" in lines


def test_top_omits_columns_on_a_narrow_terminal_and_never_cuts_a_name():
    status = running()
    status.components = [ComponentStatus("agent", "main-7f3a91c2", "updating", 1, running=12, waiting=345)]
    components = [ComponentState(name, "restarting", 3) for name in ("coordinator", "rollout-main-0", "reward-sums")]
    for component in components:
        component.usage = Usage(13, 0.5, 1234 << 20)
    shown = snapshot(status, components=components)
    headings = {
        width: next(line.split() for line in text_of(draw_usage(shown, width), width).splitlines() if "cpu %" in line)
        for width in (25, 40, 60, 80)
    }
    assert headings[25] == ["component", "cpu", "%"]
    assert headings[40] == ["component", "cpu", "%", "memory"]
    assert headings[60] == ["component", "state", "cpu", "%", "memory", "restarts"]
    assert headings[80] == ["component", "state", "cpu", "%", "memory", "processes", "restarts"]
    for width in (20, 25, 40, 60, 80):
        text = text_of(draw_usage(shown, width), width)
        assert "…" not in text and all(len(line.rstrip()) <= width for line in text.splitlines())
        assert all(name in text for name in ("coordinator", "rollout-main-0", "reward-sums", "main-7f3a91c2"))
    assert text_of(draw_usage(shown, 10), 10).replace("\n", "").replace(" ", "").count("rollout-main-0") == 1


def test_top_shows_queues_and_where_the_time_went_whole_on_a_narrow_terminal():
    status = running()
    status.queues = [Queue("groups_complete", 1)]
    seconds = {"generating": 77.0, "waiting": 7.0, "paused": 15.0, "dead": 1.0}
    status.metrics += [Metric(f"engine_seconds/{name}", value) for name, value in seconds.items()]
    status.metrics += [Metric("seconds_updating_weights", 35.9), Metric("tokens_per_second", 1097.9)]
    times = [
        "seconds updating weights 36",
        "engines generating 77 %",
        "engines waiting for work 7 %",
        "engines paused for weights 15 %",
        "engines dead 1 %",
        "tokens/s 1,098",
    ]
    for width, rows in {
        40: ["metric now", "groups_complete 1", *times],
        60: ["metric now metric now", f"groups_complete 1 {times[0]}", *times[1:]],
        0: ["metric now", "groups_complete 1", *times],
    }.items():
        text = text_of(draw_usage(snapshot(status), width), width or 100)
        assert "…" not in text
        assert [" ".join(line.split()) for line in text.splitlines()][-len(rows) :] == rows


def test_top_shows_how_requests_are_sent_and_what_was_lost_beside_each_other_where_they_fit():
    status = running()
    status.queues, status.staleness = [Queue("waiting", 1)], "0.5/1"
    values = {
        "weights/update_seconds": 1.9,
        "weights/pause_seconds": 0.414,
        "dispatch/members_at_home": 0.974,
        "dispatch/turns_at_home": 1.0,
        "response_length/trained_over_scored": 0.9812,
        "response_length/trained_ks_p": 0.0123,
        "tokens_per_second": 9.0,
    }
    status.metrics += [Metric(name, value) for name, value in values.items()]
    status.events = {"rejected/function": 7, "requeued/engine_restarted": 1204, "aborted/drained": 7}
    status.events |= {f"evicted/{name}": count for count, name in enumerate(("a", "b", "c", "d"), 1)}
    figures = [
        "staleness mean/most 0.5/1",
        "weight update of an engine 1.90 s",
        "pause in an update 0.41 s",
        "members sent to their prefix 97 %",
        "turns sent to their prefix 100 %",
        "trained over scored length 0.981",
        "p of equal lengths 0.012",
    ]
    lost = [
        "requeued engine_restarted 1,204",
        "aborted drained 7",
        "rejected function 7",
        "evicted d 4",
        "evicted c 3",
        "evicted b 2",
    ]
    pair = [f"{figure} {event}" for figure, event in itertools.zip_longest(figures, lost, fillvalue="")]
    title = "metric now"
    for width, rows in {
        40: [f"{title} {title}", "waiting 1 tokens/s 9", "", title, *figures, *lost],
        60: [f"{title} {title}", "waiting 1 tokens/s 9", "", title, *figures, *lost],
        80: [f"{title} {title} {title}", f"waiting 1 tokens/s 9 {figures[0]}", *figures[1:], "", title, *lost],
        140: [" ".join([title] * 4), f"waiting 1 tokens/s 9 {pair[0]}", *(line.strip() for line in pair[1:])],
    }.items():
        text = text_of(draw_usage(snapshot(status), width), width)
        assert "…" not in text and all(len(line.rstrip()) <= width for line in text.splitlines())
        assert [" ".join(line.split()) for line in text.splitlines()][-len(rows) :] == rows


def test_top_shows_the_state_of_a_run_that_has_no_components_yet():
    lines = text_of(draw_usage(snapshot(message="running the initializer", components=[]), 80), 80).split("\n")
    assert lines == ["sums  runs/sums  0:00", "starting: running the initializer", "", ""]


def test_a_path_longer_than_the_terminal_is_wrapped_and_not_cut():
    path = "/home/engineer/projects/experiments/runs/sums"
    text = text_of(draw(snapshot(message=f"the disk of {path} is full", directory=path, components=[]), 40), 40)
    assert "…" not in text and f"thediskof{path}isfull" in "".join(text.split())


def test_an_evaluation_alone_has_a_summary_without_steps_and_no_plot(tmp_path):
    status = running(0)
    status.progress.steps = 0
    assert summary(snapshot(status, directory=tmp_path))[0] == "evaluated in 0:20"
    assert draw_plot(status, tmp_path, "sums") == "" and not any(tmp_path.iterdir())


def test_durations_are_clocks():
    assert [clock(seconds) for seconds in (0, 65, 3661)] == ["0:00", "1:05", "1:01:01"]


def test_one_line_says_what_is_waited_for():
    line = one_line(snapshot(running(0, "Starting", "waiting for the trainer to connect")))
    assert line.endswith("starting: waiting for the trainer to connect")


def test_the_summary_of_one_evaluation_claims_no_gain(tmp_path):
    assert "held-out accuracy of sums: 0.250 on 64 problems" in summary(snapshot(running(), directory=tmp_path))


def evaluated(*, failed=1, failure="reward mine raised ValueError: no"):
    return EvaluationResult(3, "sums", 0.5, 3, 0.5, failed, failure)


ENDED = EndedSamples(trained=120, filtered=5, surplus=3, failed=244, last_failure="reward mine raised ValueError: no")


def test_failed_samples_are_shown_with_their_share_and_the_last_reason(tmp_path):
    status = running()
    status.ended = ENDED
    line = "244 samples (66 %), last: reward mine raised ValueError: no"
    assert f"failed      {line}" in text_of(draw(snapshot(status), 100))
    assert f"failed     {line}" in list(plain_lines(snapshot(status)))
    assert "  1:20 left  failed 66 %  running" in one_line(snapshot(status))
    assert summary(snapshot(status, directory=tmp_path))[3:5] == [
        f"failed in training: {line}",
        f"list of failed samples: rljob samples {tmp_path} --state failed",
    ]
    assert snapshot(status).data()["status"]["ended"]["failed"] == 244
    narrow = text_of(draw(snapshot(status), 40), width=40)
    assert max(map(len, narrow.splitlines())) <= 40 and "raised" in narrow


def test_one_line_names_failed_samples_before_the_first_step():
    status = running(0)
    status.ended = EndedSamples(failed=244, last_failure="reward mine raised ValueError: no")
    assert one_line(snapshot(status)).split("  ")[1:] == ["failed 100 %", "running"]


def test_plain_lines_name_failed_samples_and_the_last_reason_while_no_step_is_done(monkeypatch):
    now = 100.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    shown, out = plain()
    status = running(0)
    with shown:
        for at, failed, reason in ((100, 0, ""), (101, 2, "no"), (130, 4, "again"), (161, 6, "still"), (999, 6, "")):
            now = at
            status.ended = EndedSamples(trained=2, failed=failed, last_failure=f"reward mine raised: {reason}")
            shown.show(snapshot(status))
    assert [line for line in out.getvalue().splitlines() if "failed" in line] == [
        "failed: 2 samples (50 %), last: reward mine raised: no",
        "failed: 6 samples (75 %), last: reward mine raised: still",
    ]


def test_filtered_surplus_and_expired_samples_are_shown_when_they_are_many():
    status = running()
    status.ended = EndedSamples(trained=100, filtered=700, surplus=50, expired=150)
    lines = list(plain_lines(snapshot(status)))
    assert "filtered   700 samples (70 %), groupFilter rejected their groups" in lines
    assert "expired    150 samples (15 %), their groups were not complete at the deadline" in lines
    assert not any(line.startswith(("surplus", "failed")) for line in lines)
    assert "filtered 70 %, expired 15 %" in one_line(snapshot(status))


def test_nothing_is_said_of_ends_of_which_there_are_none_or_few():
    status = running()
    for status.ended in (EndedSamples(), EndedSamples(trained=100, surplus=5)):
        assert not any(line.startswith(("failed", "surplus", "filtered")) for line in plain_lines(snapshot(status)))
    status.ended = EndedSamples(trained=1000, failed=1)
    assert "failed     1 sample (<1 %)" in list(plain_lines(snapshot(status)))


def test_pass_at_k_is_shown_by_task_and_over_all_tasks(tmp_path):
    results = [
        EvaluationResult(0, task, 0.5, 4, 0.75, failed, "", 8, [PassRate(1, 0.5), PassRate(8, rate)])
        for task, failed, rate in (("sums", 0, 1.0), ("products", 3, 0.75))
    ]
    assert [line.split() for line in text_of(evaluation_table(5, results)).splitlines()] == [
        ["step", "5", "accuracy", "pass@1", "pass@8", "mean", "reward", "problems"],
        ["sums", "0.500", "0.500", "1.000", "0.750", "4"],
        ["products", "0.500", "0.500", "0.750", "0.750", "4"],
        ["all", "tasks", "0.500", "0.500", "0.875", "0.750", "8"],
        ["products:", "3", "of", "32", "answers", "failed", "and", "count", "as", "0"],
    ]
    status = running()
    status.evaluations = results
    line = "held-out accuracy of products: 0.500 on 4 problems, pass@1 0.500, pass@8 0.750"
    assert line in summary(snapshot(status, directory=tmp_path))


def test_an_evaluation_fits_a_narrow_terminal():
    rates = [PassRate(k, 0.5) for k in (1, 8)]
    results = [EvaluationResult(5, task, 0.5, 1024, 0.75, 0, "", 8, rates) for task in ("arithmetic-sums", "products")]
    headings = {}
    for width in (30, 40, 60, 80):
        text = text_of(evaluation_table(5, results, width), width)
        rows = text.splitlines()
        headings[width] = rows[0].split()[2:]
        assert "…" not in text and all(len(row.rstrip()) <= width for row in rows)
        assert [row.split("  ")[0] for row in rows[1:]] == ["arithmetic-sums", "products", "all tasks"]
    assert headings == {
        30: ["accuracy"],
        40: ["accuracy", "pass@8"],
        60: ["accuracy", "pass@1", "pass@8", "problems"],
        80: ["accuracy", "pass@1", "pass@8", "mean", "reward", "problems"],
    }


def test_the_summary_shows_where_the_time_of_the_engines_went(tmp_path):
    status = running()
    names = {"generating": 81.0, "waiting": 10.0, "paused": 6.0, "dead": 3.0}
    status.metrics += [Metric(f"engine_seconds/{name}", seconds) for name, seconds in names.items()]
    shares = "81 % generating, 10 % waiting for work, 6 % paused for weights, 3 % dead"
    assert f"time of the engines: {shares}" in summary(snapshot(status, directory=tmp_path))
    assert not any("engines" in line for line in summary(snapshot(running(), directory=tmp_path)))


def test_failed_problems_are_shown_beside_the_accuracy(tmp_path):
    status = running()
    status.evaluations.append(evaluated())
    said = "1 of 3 problems failed and count as 0: reward mine raised ValueError: no"
    assert f"held out   sums 0.250 → 0.500 at version 3, {said}" in list(plain_lines(snapshot(status)))
    assert f"evaluation of sums at version 3: {said}" in summary(snapshot(status, directory=tmp_path))
    assert text_of(evaluation_table(3, [evaluated()])).splitlines()[2] == f"sums: {said}"
    assert len(text_of(evaluation_table(3, [evaluated(failed=0, failure="")])).splitlines()) == 2
