"""Output of rljob samples, show and audit on a terminal and in a pipe."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledgers import alter, ask, batch_of, copy, make_run, set_text
from rich.console import Console
from rich.text import Text
from world import turns_of

from rljob.cli import ledger
from rljob.cli.ledger import COLUMNS
from rljob.cli.main import main
from rljob.ledger.audit import audit
from rljob.ledger.store import SCHEMA_VERSION

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rljob(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return exit code, stdout and stderr."""

    def command(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rljob", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return command


def terminal(width: int = 110) -> Console:
    """Return standard output as a narrow terminal with colours."""
    return Console(markup=False, highlight=False, force_terminal=True, width=width, color_system="256")


def test_samples_piped_are_lines_with_tabs_without_colours_or_cuts(rljob: Command, finished_run: Path) -> None:
    code, out, err = rljob("samples", finished_run, "--step", 5)
    head, *lines = [line.split("\t") for line in out.splitlines()]
    assert (code, err, tuple(head)) == (0, "", COLUMNS)
    assert [line[0] for line in lines] == batch_of(finished_run, 5)
    assert {len(line) for line in lines} == {len(COLUMNS)}
    assert {tuple(line[1:4]) for line in lines} == {("sums", "trained", "5")} and {line[-1] for line in lines} == {
        "text"
    }


def test_samples_show_the_start_of_the_text_on_one_line(rljob: Command, finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    text = "a\tb\nc\\ " + "long " * 40
    set_text(run, text, "sample_number IN (SELECT number FROM samples WHERE step = 5)")
    _, out, _ = rljob("samples", run, "--limit", 1)
    assert out.splitlines()[1].split("\t")[-1] == text[:80].replace("\\", "\\\\").replace("\t", "\\t").replace(
        "\n", "\\n"
    )


def test_failed_samples_are_listed_with_their_reason_also_those_that_had_an_answer(
    rljob: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path / "run")
    own, other = "reward mine raised ValueError: " + "no " * 100, "sample g2.0 of the group failed: reward mine raised"
    alter(run, "UPDATE samples SET state = 'failed', reason = '" + other + "' WHERE group_id = 'g2'")
    alter(run, f"UPDATE samples SET reason = '{own}' WHERE id = 'g2.0'")
    _, out, _ = rljob("samples", run, "--state", "failed", "--group", "g2")
    texts = [line.split("\t")[-1] for line in out.splitlines()[1:]]
    assert texts == [own, *[other] * (len(texts) - 1)] and len(texts) > 1


def test_failed_samples_are_counted_with_their_share_and_the_last_reason(
    rljob: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path / "run")
    alter(run, "UPDATE samples SET reason = 'z, first' WHERE id = 'g1.0'")
    alter(run, "UPDATE samples SET reason = 'a, ' || printf('%.300c', 'x') WHERE id = 'g5.1'")
    alter(run, "UPDATE samples SET state = 'scored' WHERE group_id = 'g2'")
    ((failed, ended),) = ask(run, "SELECT TOTAL(state = 'failed'), TOTAL(state != 'scored') FROM samples")
    counted = f"{failed:.0f} failed samples ({100 * failed / ended:.0f} % of the {ended:.0f} that have ended)"
    last = f"last: a, {'x' * 196}…"
    code, out, err = rljob("samples", run, "--state", "failed", "--limit", 1)
    assert (code, len(out.splitlines())) == (0, 2), "only the table is on stdout"
    assert err == f"rljob: 1 of {counted}, {last}; --limit {failed:.0f} lists all\n"
    _, out, err = rljob("samples", run, "--state", "failed", "-o", "json")
    assert (len(json.loads(out)), err) == (failed, f"rljob: {counted}, {last}\n")
    _, out, err = rljob("samples", run, "--state", "failed", "--group", "g1", "--kind", "train", "--task", "sums")
    assert err == "rljob: 1 failed sample (33 % of the 3 that have ended), last: z, first\n"


def test_samples_on_a_terminal_are_a_table_of_its_width(
    rljob: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "Terminal", terminal)
    _, out, _ = rljob("samples", finished_run, "--limit", 3)
    plain = Text.from_ansi(out).plain
    assert "\x1b[" in out and all(name in plain.splitlines()[0] for name in COLUMNS)
    assert all(len(line) <= 110 for line in plain.splitlines())
    assert [line.split()[0] for line in plain.splitlines()[1:]] == batch_of(finished_run, 5)[:3]


def test_failed_samples_on_a_terminal_have_their_whole_reason_and_all_columns_that_fit(
    rljob: Command, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(finished_run, tmp_path / "run")
    reason = " ".join(map(str, range(100)))
    alter(run, f"UPDATE samples SET state = 'failed', reason = '{reason}' WHERE group_id = 'g2'")
    for width in (110, 80, 40):
        monkeypatch.setattr(ledger, "Terminal", lambda width=width: terminal(width))
        _, out, _ = rljob("samples", run, "--state", "failed", "--group", "g2", "--limit", 1)
        head, *lines = Text.from_ansi(out).plain.splitlines()
        assert head.split()[0] == "sample" and lines[0].split()[0] == "g2.0"
        assert " ".join(" ".join(line[head.index("text") :] for line in lines).split()) == reason
        assert all(len(line) <= width for line in lines)


def test_samples_on_80_columns_keep_end_and_start_of_the_text(
    rljob: Command, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "Terminal", lambda: terminal(80))
    run = copy(finished_run, tmp_path / "run")
    set_text(run, "the answer is forty-two, since six times seven")
    _, out, _ = rljob("samples", run, "--limit", 3)
    head, *lines = Text.from_ansi(out).plain.splitlines()
    assert {"sample", "reward", "finish", "text"} <= set(head.split()) < set(COLUMNS)
    assert all(len(line) <= 80 and "the answer is forty-two" in line for line in lines)


def test_an_empty_list_is_explained_on_stderr(rljob: Command, finished_run: Path) -> None:
    sentence = "rljob: no sample of this run matches all filters\n"
    assert rljob("samples", finished_run, "--group", "g999") == (0, "\t".join(COLUMNS) + "\n", sentence)
    assert rljob("samples", finished_run, "--group", "g999", "-o", "json") == (0, "[]\n", sentence)


def test_a_batch_that_is_not_formed_yet_is_reported(rljob: Command, finished_run: Path) -> None:
    _, _, err = rljob("samples", finished_run, "--step", 999)
    assert re.fullmatch(r"rljob: there is no batch 999 yet; the newest is \d+\n", err)


def test_samples_as_json_and_as_json_lines_are_the_same(rljob: Command, finished_run: Path) -> None:
    selection = ("samples", finished_run, "--kind", "train", "--sort", "reward", "--reverse", "--limit", 5)
    together = json.loads(rljob(*selection, "-o", "json")[1])
    lines = [json.loads(line) for line in rljob(*selection, "-o", "jsonl")[1].splitlines()]
    assert together == lines and len(lines) == 5
    assert [line["reward"] for line in lines] == [0.0] * 5


def test_show_prints_all_data_of_a_sample(rljob: Command, finished_run: Path) -> None:
    name = next(name for name in batch_of(finished_run, 5) if turns_of(name) == 1)
    code, out, _ = rljob("show", finished_run, name)
    assert code == 0 and "\x1b" not in out
    assert out.startswith(f"{name}  trained in batch 5\ntask       sums, row ")
    for words in ("\nreward ", "\nadvantage ", "\nversions ", "staleness", "\nprompt\n", "\nanswer\n", " on engine-"):
        assert words in out
    group = name.rpartition(".")[0]
    siblings = [row[0] for row in ask(finished_run, f"SELECT id FROM samples WHERE group_id = '{group}'")]
    assert all(f" {sibling}  " in out for sibling in siblings if sibling != name)
    ((tokens,),) = ask(finished_run, f"SELECT response_tokens FROM samples WHERE id = '{name}'")
    table = out.partition("index  token  log-probability")[2].splitlines()[1:]
    assert len(table) == tokens and all(line.split()[2:4] == ["-1.000000", "0.3679"] for line in table)


def test_show_prints_every_turn_with_its_observation_and_its_reward(rljob: Command, finished_run: Path) -> None:
    name = next(name for name in batch_of(finished_run, 5) if turns_of(name) == 2)
    _, out, _ = rljob("show", finished_run, name)
    ((tokens,),) = ask(finished_run, f"SELECT response_tokens FROM samples WHERE id = '{name}'")
    assert f"tokens     3 prompt, {tokens} response, 3 observation\n" in out
    turns = out[out.index("\nturn 0 ") :]
    assert re.findall(r"^(prompt|observation|answer)$", turns, re.M) == ["prompt", "answer", "observation", "answer"]
    assert "reward 0.25, versions " in turns and turns.index("reward 0.25") < turns.index("\nturn 1 ")
    assert len(re.findall(r" -1\.000000 ", turns)) == tokens


def test_show_replays_the_turns_alone(rljob: Command, finished_run: Path) -> None:
    """Each turn is one block: engine, reward and versions, what the model saw, what it wrote."""
    name = next(name for name in batch_of(finished_run, 5) if turns_of(name) == 2)
    code, out, err = rljob("show", finished_run, name, "--turns")
    assert (code, err) == (0, "")
    heads = re.findall(r"^(turn \d|prompt|observation|answer)", out, re.M)
    assert heads == ["turn 0", "prompt", "answer", "turn 1", "observation", "answer"]
    summaries = re.findall(r"^ +reward ([\d.-]+), versions (\d+)(?:-(\d+))?$", out, re.M)
    assert len(summaries) == 2 and summaries[0][0] == "0.25"
    versions = [int(version) for _, low, high in summaries for version in (low, high) if version]
    bounds = ask(finished_run, f"SELECT min_version, max_version FROM samples WHERE id = '{name}'")
    assert [(min(versions), max(versions))] == [tuple(row) for row in bounds]
    assert "log-probability" not in out
    everything = rljob("show", finished_run, name)[1]
    assert all(line in everything for line in out.splitlines())


def test_a_replay_of_turns_without_payload_says_why_it_is_empty(rljob: Command, finished_run: Path) -> None:
    code, out, err = rljob("show", finished_run, batch_of(finished_run, 0)[0], "--turns")
    assert code == 0 and "its tokens were removed, as checkpoints cover them" in err and "answer" not in out


def test_show_colours_tokens_by_their_probability_on_a_terminal(
    rljob: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "Terminal", terminal)
    _, out, _ = rljob("show", finished_run, batch_of(finished_run, 5)[0])
    orange = "\x1b[38;5;208m"  # between a tenth and a half
    assert out.count(orange) >= 2


def test_show_as_json_is_the_whole_sample(rljob: Command, finished_run: Path) -> None:
    name = batch_of(finished_run, 5)[0]
    shown = json.loads(rljob("show", finished_run, name, "-o", "json")[1])
    assert shown["sample"]["id"] == name and shown["turns"][0]["written"][0].keys() == {
        "id", "text", "logprob", "version",
    }  # fmt: skip


def test_show_of_a_sample_without_payload_prints_the_rest(rljob: Command, finished_run: Path) -> None:
    code, out, _ = rljob("show", finished_run, batch_of(finished_run, 0)[0])
    assert code == 0 and "its tokens were removed, as checkpoints cover them" in out
    assert out.endswith("\nanswer\ntext\n")


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("sequences", "[1,", "Input data was truncated"),
        ("sequences", '"x"', "Expected `array | null`, got `str`"),
        ("turn_rewards", "[0.5", "Input data was truncated"),
        ("turn_rewards", '["much"]', "Expected `float`, got `str`"),
        ("metrics", "{", "Input data was truncated"),
        ("metrics", '{"a": "b"}', "Expected `float`, got `str`"),
        ("completions", "[", "malformed JSON"),
        ("prompt_tokens", "many", "Expected `int | null`, got `str`"),
    ],
)
def test_a_damaged_value_of_a_sample_is_one_sentence(
    rljob: Command, finished_run: Path, tmp_path: Path, column: str, value: str, sentence: str
) -> None:
    run, name = copy(finished_run, tmp_path / "run"), batch_of(finished_run, 5)[0]
    alter(run, f"UPDATE samples SET {column} = '{value}' WHERE id = '{name}'")
    code, out, err = rljob("show", run, name)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert "ledger.sqlite has a damaged value: " in err and sentence in err and "; rljob audit names the rows" in err
    if column in ("sequences", "prompt_tokens"):
        assert rljob("samples", run) == (2, "", err)
    code, out, err = rljob("audit", run)
    assert (code, err) == (1, "") and name in out


def test_audit_prints_passed_checks_and_exits_0(rljob: Command, finished_run: Path) -> None:
    code, out, err = rljob("audit", finished_run)
    assert (code, err) == (0, "") and "\x1b" not in out
    first, *checks, last = out.splitlines()
    assert "0 open" in first and "24 trained" in first
    assert all(line.startswith("ok      ") for line in checks) and last == "all checks ok"


def test_audit_prints_failed_checks_and_exits_1(rljob: Command, finished_run: Path, tmp_path: Path) -> None:
    run = copy(finished_run, tmp_path / "run")
    alter(run, "UPDATE publications SET digest = 'ff' WHERE step = 4")
    code, out, _ = rljob("audit", run)
    assert code == 1 and out.splitlines()[-1] == "1 check failed"
    assert "FAILED  engines served what was published (14 examined)\n        version 4 on engine-0.0, " in out
    code, out, _ = rljob("audit", run, "-o", "json")
    report = json.loads(out)
    assert code == 1 and report.keys() == {"ok", "finished", "counts", "checks"}
    assert [check["name"] for check in report["checks"] if not check["ok"]] == ["engines served what was published"]


def test_audit_of_a_running_run_counts_open_samples(rljob: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", turns=25, deaths="")
    code, out, _ = rljob("audit", run)
    assert code == 0 and f"{audit(run).counts['open']} open" in out
    assert out.splitlines()[-1].startswith("all checks ok; the run is not finished")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "RUN", "g3"), "g3 is a group; its samples are g3.0, g3.1, g3.2"),
        (("show", "RUN", "g3.7"), "there is no sample 'g3.7'; the samples of g3 are g3.0, g3.1, g3.2"),
        (("show", "RUN", "g3.0", "g3.1"), "give a run and one sample, for example: rljob show runs/sums g17.3"),
        (("show", "RUN"), "give a sample of that run too, for example: rljob show "),
        (("show", "RUN", "zz"), "'zz' is not a sample id; ids are like g17.3"),
        (("show", "RUN", "g999.0"), "there is no sample 'g999.0'; the newest is g"),
        (("samples", "RUN", "--task", "zz"), "there is no task 'zz'; the tasks of this run are sums"),
        (("samples", "none"), "there is no run 'none'"),
        (("audit", "none"), "there is no run 'none'"),
        (("samples", "RUN", "--sort", "beauty"), "'beauty' is not one of 'newest', 'reward'"),
        (("samples", "RUN", "--state", "traned"), "'traned' is not one of 'admitted', 'scored'"),
        (("samples", "RUN", "--limit", "0"), "should be greater than or equal to 1"),
        (("show",), "Missing argument '[RUN] SAMPLE'"),
    ],
)
def test_bad_input_gives_a_message_and_exit_2(
    rljob: Command, finished_run: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = rljob(*(str(finished_run) if word == "RUN" else word for word in arguments))
    assert (code, out) == (2, "") and sentence in " ".join(err.split())


def test_a_ledger_of_another_version_or_a_run_that_has_not_started_exits_2(
    rljob: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = copy(finished_run, tmp_path / "run")
    alter(run, "PRAGMA user_version=99")
    for command in (("samples", run), ("audit", run), ("show", run, "g0.0")):
        code, out, err = rljob(*command)
        assert (code, out) == (2, "")
        assert f"another version of rljob (ledger 99, this one reads {SCHEMA_VERSION})" in err
    (run / "ledger.sqlite").unlink()
    for command in (("samples", run), ("audit", run), ("show", run, "g0.0")):
        code, out, err = rljob(*command)
        assert (code, out) == (2, "")
        assert err == f"rljob: the run in {run} has no ledger yet: it has not started; rljob run starts it\n"
