"""`rljob simulate`: predictions, the timeline, and wrong input."""

import json

import pytest

from rljob.api.yaml_loader import write_yaml
from rljob.protocol.simulation_messages import SimulationResult, SplitPrediction

SPEEDS = {
    "engine": {"tokensPerSecondPerSequence": 10.0, "tokensPerSecond": 20.0, "weightUpdateSeconds": 1.0},
    "trainer": {"tokensPerSecondPerGpu": 100.0},
    "answers": {"medianTokens": 40.0, "sigma": 0.0},
    "promptTokens": 10,
}


@pytest.fixture
def files(tmp_path, manifest):
    """Write a manifest with one engine and two trainer GPUs, and the speeds; return a function that does it again."""
    manifest["spec"]["training"] = {"steps": 50, "promptsPerStep": 2, "samplesPerPrompt": 2, "maxStaleness": 0}
    manifest["spec"]["tasks"][0]["sampling"] = {"maxTokens": 64}
    manifest["spec"]["rollouts"] = [{"name": "main", "maxConcurrency": 4, "maxModelLength": 128}]
    manifest["spec"]["trainer"] = {"processesPerNode": 2}

    def write(**changes):
        (tmp_path / "job.yaml").write_text(write_yaml(manifest))
        (tmp_path / "speeds.yaml").write_text(write_yaml(SPEEDS | changes))
        return tmp_path / "job.yaml", "--engines", tmp_path / "speeds.yaml"

    return write


@pytest.fixture
def simulated(monkeypatch):
    """Replace the simulation by a result; return the list of requests that it gets."""
    requests = []

    def simulated(request, source):
        requests.append(request)
        return SimulationResult([SplitPrediction(1, 2, 10.0, 0.8, 0.1, 0.0, 16.0)], [], [], 1, {"traceEvents": []})

    monkeypatch.setattr("rljob.cli.simulate._simulated", simulated)
    return requests


def test_every_split_is_predicted_from_the_speeds(rljob, files):
    """α = 0: four answers of 40 tokens share 20 tokens/s of an engine, then the trainer has 4 × 50 tokens."""
    code, out, err = rljob("simulate", *files(), "--steps", 3, "-o", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["gpus"], found["best"]) == (3, 2)
    one, two = found["splits"]
    assert one["stepSeconds"] == pytest.approx(4 * 40 / 20 + 4 * 50 / 200 + 1)
    assert two["stepSeconds"] == pytest.approx(2 * 40 / 20 + 4 * 50 / 100 + 1), "two engines, one trainer GPU"
    assert one["engineUtilisation"] == pytest.approx(8 / 10)
    assert one["trainerUtilisation"] == pytest.approx(1 / 10)
    assert one["tokensPerSecond"] == pytest.approx(160 / 10)
    assert one["meanStaleness"] == 0


def test_the_table_marks_the_best_split_and_that_of_the_manifest(rljob, files):
    code, out, _ = rljob("simulate", *files())
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["1", "1", "2", "10.0", "s", "80%", "10%", "0.00", "16", "manifest"],
        ["2", "2", "1", "7.0", "s", "57%", "29%", "0.00", "23", "best"],
    ]


def test_the_timeline_shows_the_best_split(rljob, files, tmp_path):
    assert rljob("simulate", *files(), "--steps", 2, "--trace", tmp_path / "out.json")[0] == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "trainer", 1: "engine-0000", 2: "engine-0001"}
    kinds = {kind: [e for e in events if e.get("cat") == kind] for kind in ("train", "generate", "weights")}
    assert [event["name"] for event in kinds["train"]] == ["step 0", "step 1", "step 2", "step 3"]
    assert kinds["train"][0] | {"args": 0} == {
        "name": "step 0", "cat": "train", "ph": "X", "pid": 0, "tid": 0, "ts": 5e6, "dur": 2e6, "args": 0,
    }  # fmt: skip
    assert {(event["tid"], event["dur"]) for event in kinds["generate"]} == {(1, 4e6), (2, 4e6)}
    assert len(kinds["generate"]) == 4 * 4
    assert {(event["pid"], event["tid"], event["dur"]) for event in kinds["weights"]} == {(1, 0, 1e6), (2, 0, 1e6)}


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("none/out.json", "--trace: there is no directory {0}/none; make it first, or give another path"),
        (".", "--trace: {0} is a directory; give the path of a file"),
    ],
)
def test_a_path_of_the_timeline_that_cannot_be_written_is_refused_before_the_simulation(
    rljob, files, tmp_path, simulated, path, sentence
):
    code, out, err = rljob("simulate", *files(), "--trace", tmp_path / path)
    assert (code, out, err, simulated) == (2, "", f"rljob: {sentence.format(tmp_path)}\n", [])


def test_a_timeline_that_cannot_be_written_does_not_lose_the_prediction(rljob, files, simulated):
    code, out, err = rljob("simulate", *files(), "--steps", 1, "--trace", "/dev/full")
    assert code == 1 and "No space left on device" in err
    assert [line.split()[0] for line in out.splitlines()] == ["engines", "1"]
    assert simulated[0].trace


def test_the_answers_of_each_task_end_at_its_own_limit(rljob, files, manifest):
    """Two tasks of equal weight take turns with the two groups of a batch: 2 × 10 and 2 × 40 tokens, at 20 a second."""
    tasks = manifest["spec"]["tasks"]
    tasks.append(tasks[0] | {"name": "short", "sampling": {"maxTokens": 10}})
    found = json.loads(rljob("simulate", *files(), "--steps", 20, "-o", "json")[1])["splits"][0]
    tokens = found["tokensPerSecond"] * found["stepSeconds"]
    assert tokens == pytest.approx(2 * 10 + 2 * 40)
    assert found["stepSeconds"] == pytest.approx(4 * 10 / 20 + 2 * 30 / 20 + (100 + 4 * 10) / 200 + 1)


def test_a_reference_and_the_teachers_of_a_task_in_pools_take_no_time(rljob, files, manifest):
    spec = manifest["spec"]
    spec["tasks"].append(spec["tasks"][0] | {"name": "more"})
    free = json.loads(rljob("simulate", *files(), "--steps", 2, "-o", "json")[1])
    spec["models"].append({"name": "big", "source": "job://big"})
    spec["rollouts"] += [{"name": name, "model": "big", "maxModelLength": 256} for name in ("large", "small")]
    spec["algorithm"] = {
        "klCoefficient": 0.1,
        "referencePool": "large",
        "teachers": [{"pool": "large"}, {"pool": "small", "tasks": ["more"]}],
    }
    code, out, err = rljob("simulate", *files(), "--steps", 2, "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["splits"] == free["splits"]


def test_engines_of_evaluations_are_not_counted(rljob, files, manifest, simulated):
    dedicated = {"name": "dedicated", "purpose": "evaluation", "maxModelLength": 128, "replicas": {"min": 4}}
    manifest["spec"]["rollouts"].append(dedicated)
    manifest["spec"]["evaluation"] = {"problems": 2, "engines": "dedicated"}
    assert json.loads(rljob("simulate", *files(), "-o", "json")[1])["gpus"] == simulated[0].devices == 3


def test_splits_beside_the_best_one_of_the_first_twelve_are_simulated_too(rljob, files):
    """34 splits, every third one at first. Two answers for each of two engines take 4 s, and more engines
    only take GPUs from the trainer; of the first twelve, 4 engines are best."""
    found = json.loads(rljob("simulate", *files(), "--gpus", 35, "--steps", 1, "-o", "json")[1])
    assert [split["engines"] for split in found["splits"]] == [1, 2, 3, 4, 5, 6, *range(7, 35, 3)]
    assert found["best"] == 2
    best = found["splits"][1]
    assert (best["engines"], best["trainerDevices"]) == (2, 33)
    assert best["stepSeconds"] == pytest.approx(4 + 4 * 50 / (33 * 100) + 1)


MEGATRON = "spec.trainer={backend: megatron, processesPerNode: 4, parallelism: {tensor: 2, pipeline: 2}}"


def test_only_splits_that_the_trainer_can_divide_are_simulated(rljob, files):
    found = json.loads(rljob("simulate", *files(), "--set", MEGATRON, "--gpus", 11, "--steps", 1, "-o", "json")[1])
    assert [split["trainerDevices"] for split in found["splits"]] == [8, 4]
    copies = "spec.trainer={processesPerNode: 3, parallelism: {replicate: 3}}"
    found = json.loads(rljob("simulate", *files(), "--set", copies, "--gpus", 8, "--steps", 1, "-o", "json")[1])
    assert [split["trainerDevices"] for split in found["splits"]] == [6, 3]


def test_a_split_that_takes_days_is_a_row_with_its_reason_beside_the_others(rljob, files):
    """A step of 200 tokens takes 100000 s on one GPU of the trainer, and half of that on two."""
    speeds = {"trainer": {"tokensPerSecondPerGpu": 0.002}}
    code, out, err = rljob("simulate", *files(**speeds), "--steps", 1)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["1", "1", "2", "50009.0", "s", "<1%", "100%", "0.00", "0.0032", "best,", "manifest"],
        ["2", "2", "1", ">", "100000", "s", "-", "-", "-", "-"],
    ]
    assert out.splitlines()[3:] == [
        "engines: 2: the trainer computes a step for 1.2 days; give it more GPUs, or correct "
        "trainer.tokensPerSecondPerGpu and secondsPerStep"
    ]
    found = json.loads(rljob("simulate", *files(**speeds), "--steps", 1, "-o", "json")[1])
    assert ([split["engines"] for split in found["splits"]], found["best"]) == ([1], 1)
    assert [(split["engines"], split["leastStepSeconds"]) for split in found["slow"]] == [(2, 100_000.0)]


FILTERS = [
    "algorithm.groupFilter=nonconstant",
    "tasks[0].groupFilter.function=mine:accept",
    "tasks[0].groupFilter.minMean=0.6",
    "tasks[0].groupFilter.maxMean=-1",
]


@pytest.mark.parametrize("field", FILTERS)
def test_a_filter_accepts_every_group_unless_told_otherwise_and_a_note_says_so(rljob, files, field):
    free = json.loads(rljob("simulate", *files(), "--steps", 2, "-o", "json")[1])
    code, out, err = rljob("simulate", *files(), "--steps", 2, "--set", f"spec.{field}", "-o", "json")
    assert (code, err) == (0, "")
    assert (free["notes"], json.loads(out)["splits"]) == ([], free["splits"])
    note = (
        "acceptedGroups is 1: every group of sums is trained, whatever the groupFilter; give the part that it accepts"
    )
    assert json.loads(out)["notes"] == [note]


@pytest.mark.parametrize("field", FILTERS)
def test_a_filter_costs_groups(rljob, files, field):
    found = json.loads(rljob("simulate", *files(acceptedGroups=0.5), "--set", f"spec.{field}", "-o", "json")[1])
    assert found["splits"][0]["stepSeconds"] > 1.3 * 10
    assert found["notes"] == ["acceptedGroups is 0.5: so many groups of sums are trained, chosen at random"]


def test_a_split_whose_engines_had_worked_ahead_shows_no_zero(rljob, files):
    """One slow GPU of the trainer: the engines generated the samples of the one counted step before it."""
    slow = {"trainer": {"tokensPerSecondPerGpu": 0.1}}
    arguments = [*files(**slow), "--steps", 1, "--set", "spec.training.maxStaleness=4"]
    _, out, _ = rljob("simulate", *arguments)
    lines = [line.split() for line in out.splitlines()]
    assert [(line[5], line[8]) for line in lines[1:3]] == [("2%", "0.48"), ("-", "-")]
    assert out.splitlines()[3:] == [
        "engines: 2: nothing was generated in the counted steps: their samples were ready before; raise --steps (1)",
        "--steps is 1, less than maxStaleness 4: engines may work ahead or wait in all of them; --steps 4 gives better "
        "means",
    ]


def test_accepted_groups_of_a_job_without_filters_have_no_effect_and_a_note_says_so(rljob, files):
    out = rljob("simulate", *files(acceptedGroups=0.5))[1].splitlines()
    assert out[1].split()[3] == "10.0"
    assert out[3:] == ["acceptedGroups is 0.5, but no task has a groupFilter: every group is trained"]


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ({"engine": {}}, [], "speeds.yaml: engine.tokensPerSecondPerSequence: required; add it"),
        ({"sigma": 1}, [], "speeds.yaml: sigma: unknown field; there are engine, trainer,"),
        ({"acceptedGroups": 0}, [], "speeds.yaml: acceptedGroups: must be more than 0, not 0"),
        (
            {"promptTokens": 128},
            [],
            "job.yaml: promptTokens is 128, which leaves no room in maxModelLength 128; lower it",
        ),
        (
            {},
            ["--set", "spec.rollouts=[{name: a}, {name: b}]"],
            "job.yaml: spec.rollouts: has 2 training pools (a, b);",
        ),
        (
            {"engine": {"tokensPerSecondPerSequence": 10.0, "tokensPerSecond": 0.0001}},
            [],
            "job.yaml: every split is too slow for a prediction; engines: 1: no sample was finished for a day; correct "
            "engine.tokensPerSecondPerSequence 10, engine.tokensPerSecond 0.0001 or rewardSeconds 0\n",
        ),
        (
            {"engine": SPEEDS["engine"] | {"weightUpdateSeconds": 61}},
            [],
            "job.yaml: engine.weightUpdateSeconds is 61: an update fails after spec.weightSync.timeoutSeconds 60; ",
        ),
        (
            {},
            ["--gpus", "100000"],
            "job.yaml: --gpus is 100000: with one GPU of the trainer there are 99999 engines, and a pool has at "
            "most 1024; give at most 1025\n",
        ),
        (
            {},
            ["--gpus", "4", "--set", MEGATRON],
            "job.yaml: --gpus is 4: no number of engines leaves a number of GPUs that spec.trainer.parallelism "
            "divides; give another number\n",
        ),
        ({}, ["--gpus", "1"], "greater than or equal to 2"),
        ({}, ["--steps", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_input_is_one_sentence(rljob, files, changes, arguments, sentence):
    code, out, err = rljob("simulate", *files(**changes), *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


def test_a_missing_file_of_speeds_is_named(rljob, files, tmp_path):
    code, _, err = rljob("simulate", files()[0], "--engines", tmp_path / "none.yaml")
    assert code == 2
    assert err == f"rljob: {tmp_path / 'none.yaml'}: there is no such file; give the path of a YAML file\n"


def test_a_job_that_fails_in_the_simulation_is_named(rljob, files, tmp_path):
    arguments = ["--set", "spec.algorithm.groupFilter=nonconstant"]
    code, _, err = rljob("simulate", *files(acceptedGroups=1e-9), *arguments)
    assert code == 2
    assert err == (
        f"rljob: {tmp_path / 'job.yaml'}: acceptedGroups is 1e-09: the run would fail, as no group of "
        "50 batches in a row is accepted; raise it\n"
    ), "once"
