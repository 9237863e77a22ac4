"""The command line: output and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from rljob.api.algorithm_presets import ZERO_FOR_ONE_SAMPLE
from rljob.api.explain import manifest_page
from rljob.api.load import loads
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import write_yaml
from rljob.cli.typer_app import app

ROOT = Path(__file__).parents[2]
WHERE = ("--context", "--namespace")


@pytest.fixture
def file(manifest, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(write_yaml(manifest))
    return path


def test_validate_reports_a_valid_manifest(rljob, file):
    assert rljob("validate", file, "--static") == (0, f"{file}: the RLJob sums is valid\n", "")


def test_validate_reports_every_error_in_a_line(rljob, file):
    code, out, err = rljob("validate", file, "--set", "spec.training.steps=-1", "--set", "spec.sed=1")
    assert (code, out) == (2, "")
    assert err == (
        f"rljob: {file}: spec.training.steps: must be at least 0, not -1\n"
        f"rljob: {file}: spec.sed: unknown field; did you mean seed?\n"
    )


def test_explain_prints_the_expanded_manifest(rljob, file):
    code, out, _ = rljob("explain", file, "--set", "spec.tasks[sums].prompt='Q: {question} :smile: [bold]'")
    assert code == 0
    job = loads(out)
    assert job == resolve(job)
    assert job.spec.algorithm.clip_low == 0.2
    assert job.spec.tasks[0].prompt == "Q: {question} :smile: [bold]"


def test_explain_imports_functions_from_the_current_directory(rljob, file, tmp_path, monkeypatch):
    (tmp_path / "own_function.py").write_text("def mine(inputs): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, _ = rljob("explain", file, "--set", "spec.algorithm.objective=own_function:mine")
    assert code == 0 and "# own_function:mine declares no needs" in out


def test_explain_counts_the_gpus_of_engines_that_span_hosts(rljob, file):
    pool = "{name: main, hosts: 2, parallelism: {tensor: 8, pipeline: 2}, replicas: {min: 2, max: 4}}"
    code, out, _ = rljob("explain", file, "--gpu", "--set", f"spec.rollouts=[{pool}]")
    assert code == 0
    assert "# pool main: an engine has 16 GPUs on 2 hosts, 8 on each; 2 to 4 engines, 32 to 64 GPUs\n" in out


@pytest.mark.parametrize("configured", [False, True])
def test_resume_of_a_run_of_this_machine_names_rljob_run(rljob, tmp_path, monkeypatch, configured):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    if configured:
        (tmp_path / "kubeconfig").write_text("{}")
        (tmp_path / "runs/sums").mkdir(parents=True)
        (tmp_path / "runs/sums/job.json").write_text("{}")
    code, out, err = rljob("resume", "sums")
    assert (code, out) == (2, "") and "give -n or --context; `rljob run FILE` resumes a run of this machine" in err
    assert rljob("resume", "sums", "-n", "team-a")[2] != err


def test_explain_describes_a_field(rljob):
    code, out, _ = rljob("explain", "--field", "spec.training.maxStaleness")
    assert code == 0
    assert out.startswith("spec.training.maxStaleness: whole number ≥ 0 and ≤ 64; default 1\n\nα: trainer version")


def test_explain_tells_the_effect_of_one_sample_per_prompt(rljob):
    _, out, _ = rljob("explain", "--field", "spec.training.samplesPerPrompt")
    for name in ("group_normalized", *ZERO_FOR_ONE_SAMPLE):
        assert f"`{name}`" in out


@pytest.mark.parametrize("arguments", [[], ["--docs", "--field", "spec"]])
def test_explain_takes_one_of_its_arguments(rljob, arguments):
    assert rljob("explain", *arguments) == (2, "", "rljob: give one of FILE, --field PATH and --docs\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "none.yaml"],
        ["explain", "none.yaml"],
        ["validate", "none.yaml"],
        ["explain", "--field", "spec.none"],
        ["explain", "--field", ""],
        ["run"],
        ["frobnicate"],
        ["run", "none.yaml", "--frobnicate"],
    ],
)
def test_bad_input_exits_2_with_nothing_on_stdout(rljob, arguments):
    code, out, err = rljob(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err


def test_commands_and_options_are_frozen(rljob):
    """Frozen: people and scripts use them."""
    options = {}
    for command in (command.callback.__name__ for command in app.registered_commands):
        _, out, _ = rljob(command, "--help")
        options[command] = sorted({word.strip(",[]") for word in out.split() if word.strip("[").startswith("--")})
    expected = {
        "run": ["--detach", "--help", "--no-screen", "--run-dir", "--set"],
        "apply": ["--context", "--dry-run", "--force-conflicts", "--help", "--namespace", "--set"],
        "status": [*WHERE, "--help", "--output", "--watch"],
        "logs": [*WHERE, "--follow", "--help", "--output", "--tail"],
        "top": [*WHERE, "--count", "--help", "--output", "--seconds"],
        "stop": [*WHERE, "--help", "--now"],
        "resume": [*WHERE, "--help"],
        "validate": ["--help", "--run-dir", "--set", "--static"],
        "explain": ["--cpu", "--docs", "--field", "--gpu", "--help", "--set"],
        "simulate": ["--engines", "--gpus", "--help", "--output", "--set", "--steps", "--trace"],
        "render": ["--cluster", "--cpu", "--gpu", "--help", "--namespace", "--output", "--set"],
        "export": [*WHERE, "--help", "--step"],
        "evaluate": ["--help", "--output", "--problems", "--set", "--step"],
        "samples": [
            *("--context", "--group", "--help", "--kind", "--limit", "--namespace", "--output"),
            *("--reverse", "--sort", "--state", "--step", "--task"),
        ],
        "show": [*WHERE, "--help", "--output", "--turns"],
        "audit": [*WHERE, "--help", "--output"],
    }
    assert options == {name: sorted(found) for name, found in expected.items()}


def test_it_runs_as_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "rljob.cli.main", "explain", "--field", "spec.seed"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("spec.seed: whole number")


@pytest.mark.parametrize(
    ("entry", "late"), [("main", "typer_app"), ("plugin", "cluster_commands"), ("plugin", "typer_app")]
)
def test_an_interrupt_during_the_start_prints_no_traceback(entry, late):
    program = f"""
import sys
class Interrupted:
    def find_spec(name, path, target=None):
        if name == "rljob.cli.{late}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
from rljob.cli.main import {entry}
{entry}()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_cli_starts_without_heavy_imports():
    foreign = {"torch", "reasoning_gym", "matplotlib", "numpy", "websockets", "rljob.remote"}
    program = f"import sys, rljob.cli.typer_app; print(*{foreign} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "\n"


def test_the_page_on_the_manifest_is_up_to_date():
    assert (ROOT / "docs" / "manifest.md").read_text() == manifest_page(), "run: make docs"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(rljob, path):
    assert rljob("validate", path)[0] == 0


def test_help_of_make_lists_the_commands_of_the_readme():
    out = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("quickstart", "test", "setup", "unit", "engine", "format"):
        assert f"make {target} " in out


def test_requirement_files_are_pinned_and_contain_no_addresses():
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                name, equals, version = line.partition("==")
                assert equals and version, f"{path.name}: {line}"
                assert all(character.isalnum() or character in ".-_!" for character in name + version), line


def test_an_invalid_choice_is_answered_with_the_choices(rljob):
    code, out, err = rljob("status", "-o", "yaml")
    assert (code, out) == (2, "")
    assert err.endswith("Error: Invalid value for '-o' / '--output': 'yaml' is not one of 'text', 'json'.\n")


def test_an_empty_run_directory_is_not_the_working_directory(rljob, file):
    assert rljob("validate", file, "--run-dir", "") == (
        2,
        "",
        "rljob: --run-dir is empty; give a directory, or leave it out\n",
    )
