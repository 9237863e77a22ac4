"""Runs the commands, manifests and programs of the documentation; checks that links and names exist."""

import re
import shutil
from pathlib import Path

import pytest
import typer

from e2e.docs.blocks import anchors, blocks, code_spans, links
from e2e.docs.reader import PAGES, matches, shell
from e2e.fields.place import manifest
from rljob.api.algorithm_presets import PRESETS
from rljob.api.explain import fields
from rljob.api.extensions import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, OBJECTIVES
from rljob.api.load import loads
from rljob.api.yaml_loader import read_yaml, write_yaml
from rljob.cli.reference import page as command_page
from rljob.cli.typer_app import app
from rljob.operator.metrics import Metrics
from rljob.operator.planning import reasons

ROOT = Path(__file__).resolve().parents[1]
FILES = {"yaml", "json", "python", "sh", "csv"}
KNOWN_FIELDS = frozenset(fields())
LANGUAGES = FILES | {"console", "text", "mermaid", ""}


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A directory with a finished run (with fakes) in runs/, which the commands of pages can read."""
    here = tmp_path_factory.mktemp("reader")
    (here / "examples").symlink_to(ROOT / "examples")
    steps = ["--set", "spec.training={steps: 4, promptsPerStep: 2, samplesPerPrompt: 2}"]
    command = ["rljob", "run", "examples/quickstart.yaml", *steps, "--set", "spec.evaluation.problems=4"]
    shell(" ".join(f"'{word}'" for word in command), here)
    return here


@pytest.fixture
def reader(run_directory, tmp_path):
    """A reader's directory: examples/, and a finished run in runs/."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(run_directory / "runs", tmp_path / "runs")
    return tmp_path


def check_yaml(block):
    """Check that a manifest, or fields of a spec, are valid."""
    if "apiVersion" in block.text:
        loads(block.text, source=str(block))
        return
    data = manifest()
    data["spec"] |= read_yaml(block.text)
    loads(write_yaml(data), source=str(block))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_work_in_order(page, reader):
    for block in blocks(page):
        assert block.language in LANGUAGES, (
            f"{block}: unknown language {block.language!r}; use text for blocks that are not tested"
        )
        if block.file is not None:
            (reader / block.file).parent.mkdir(parents=True, exist_ok=True)
            (reader / block.file).write_text(block.text)
        if block.reason is not None or block.cluster or block.pods:
            continue
        if block.language == "yaml":
            check_yaml(block)
        elif block.language == "python" and block.file is None:
            (reader / "block.py").write_text(block.text)
            shell("python block.py", reader)
        elif block.language == "console":
            for i, (command, expected) in enumerate(block.commands):
                printed = shell(command, reader, block.exit_code if i == len(block.commands) - 1 else 0)
                assert matches(expected, printed), f"{block}: {command} printed\n{printed}\ninstead of\n{expected}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_fields_and_commands_that_a_page_names_exist(page):
    for span in code_spans(page):
        if re.fullmatch(
            r"(core|cli|coordinator|operator|transfer|trainer-image|rollout-image|reward-services|charts|crds|e2e|examples"
            r"|docs|tools|benchmarks|requirements)/[\w./-]+",
            span,
        ):
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"spec(\.\w+(\[\S*\])?)+", span):
            assert re.sub(r"\[[^\]]*\]", "", span) in KNOWN_FIELDS, span
        elif span.startswith("make ") and " " not in span.removeprefix("make "):
            assert f"\n{span.removeprefix('make ')}:" in (ROOT / "Makefile").read_text(), span
        elif span.startswith(("pytest ", "python -m ")):
            for word in span.removeprefix("python -m ").split():
                if word.endswith(".py"):
                    assert (ROOT / word).exists(), span
                elif ".py::" in word:
                    file, _, test = word.partition("::")
                    assert f"def {test}(" in (ROOT / file).read_text(), span
                elif re.fullmatch(r"\w+(\.\w+)+", word) and not word.startswith("rljob."):
                    assert is_program(word), span
        elif span.startswith("rljob "):
            check_command(span)
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "console" else []:
            for command in re.findall(r"(?:^\$ |[|;&] *)(rljob .+?)(?= [|;&]|$)", line):
                check_command(command)


def is_program(module):
    """Return whether ``python -m`` finds a module of the repository: a file, or a package with __main__.py."""
    path = ROOT / module.replace(".", "/")
    return Path(f"{path}.py").is_file() or (path / "__main__.py").is_file()


def check_command(text):
    """Assert that a command of rljob and its options exist."""
    group = typer.main.get_command(app)
    words = text.split()[1:]
    if words and words[0].startswith("-"):
        known = {option for parameter in group.params for option in parameter.opts} | {"--help"}
    else:
        name = words[0]
        if not re.fullmatch(r"[a-z]+", name):
            return
        assert name in group.commands, text
        command = group.commands[name]
        while hasattr(command, "commands") and len(words) > 1:  # rljob reward check
            words = words[1:]
            command = command.commands[words[0]]
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in words:
        if re.match(r"--?[a-z]", word):
            assert word.partition("=")[0] in known, f"{text}: {word}"


def first_column(page, start):
    """Return the code spans in the first column of the table between <!-- start --> and <!-- end of start -->."""
    table = page.read_text().partition(f"<!-- {start} -->")[2].partition(f"<!-- end of {start} -->")[0]
    return re.findall(r"^\| `(\w+)`", table, re.MULTILINE)


def test_the_page_on_kubernetes_has_every_reason_of_a_condition():
    known = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    found = first_column(ROOT / "docs" / "kubernetes.md", "reasons")
    assert sorted(found) == sorted(known)


def test_the_page_on_algorithms_has_every_preset_function_and_field():
    names = {name for span in code_spans(ROOT / "docs/algorithms.md") for name in re.findall(r"\w+", span)}
    functions = [*PRESETS, *ADVANTAGES, *OBJECTIVES, *CORRECTIONS, *AGGREGATIONS, *KL_ESTIMATORS]
    own = [path.rpartition(".")[2] for path in KNOWN_FIELDS if path.startswith("spec.algorithm.")]
    assert [name for name in [*functions, *own] if name not in names] == []


def test_the_page_on_the_operator_has_every_metric():
    metrics = Metrics()
    metrics.kubernetes_supported.labels("v1.36.3").set(1)
    metrics.at_scrape(lambda: [("Ready", "True")], lambda: {"pods": 1}, lambda: {"pods": 1.0}, lambda: {"runner": 1})
    known = {
        sample.name
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket", "_sum", "_count"))
    } | {family.name for family in metrics.registry.collect() if family.type in ("histogram",)}
    known |= {f"{family.name}_total" for family in metrics.registry.collect() if family.type == "counter"}
    assert sorted(first_column(ROOT / "docs" / "operator.md", "metrics")) == sorted(known)


def test_a_block_that_is_not_run_gives_a_reason():
    for page in PAGES:
        for block in blocks(page):
            if "not-run" in block.info:
                assert block.reason and len(block.reason) > 10, block


def test_output_is_compared_with_gaps():
    assert matches("a … d", "a b\nc d\n")
    assert matches("", "whatever")
    assert matches("a\n…\nb", "x\na\nb\n")
    assert not matches("a … e", "a b c d")


def test_the_page_on_the_command_line_is_up_to_date():
    assert (ROOT / "docs" / "cli.md").read_text() == command_page(), "run: make docs"
