"""Invalid manifests: `rljob run` reports sentences, exits with 2, and changes no file.

What depends on the machine is in e2e/test_bad_input.py.
"""

import random
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.tests.manifests import MANIFEST
from core.tests.test_api_properties import SCHEMA, values
from rljob.api.errors import ManifestError
from rljob.api.load import loads, validate
from rljob.api.yaml_loader import write_yaml
from rljob.cli.main import main
from rljob.local import process_cleanup

TEXTS = {
    "an empty file": ("", "the manifest is empty; it begins with apiVersion"),
    "a list": ("- a\n- b\n", "the manifest is not a mapping; it begins with apiVersion"),
    "a tab": ("spec:\n\tseed: 1\n", "line 2, column 1: a tab; indent with spaces"),
    "an open bracket": ("spec: [1, 2\n", "line 2, column 1: .*expected"),
    "a key twice": ("kind: RLJob\nkind: RLJob\n", "line 2, column 1: the key 'kind' is used twice; keep one"),
    "two documents": ("kind: RLJob\n---\nkind: RLJob\n", "a second document begins; keep one RLJob in a file"),
    "a key that is no text": ("1: a\n", "the key '1' is not text; put it in quotes"),
    "a tag": ("kind: !!python/object:os.system x\n", "the tag .* has no meaning in a manifest; remove it"),
    "infinity": ("spec: {seed: .inf}\n", "line 1, column 14: '.inf' is infinite or not a number"),
    "another kind of object": (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {}\n",
        "apiVersion: must be 'rljob.dev/v1alpha1', not 'v1'",
    ),
}
SETTINGS = {
    "an unknown field": ("spec.sed=1", "spec.sed: unknown field; did you mean seed\\?"),
    "an unknown field inside": (
        "spec.trainer.optimizer.lr=1",
        "spec.trainer.optimizer.lr: unknown field; there are lea",
    ),
    "snake case": ("spec.training.max_staleness=1", "spec.training.max_staleness: unknown field; did you mean maxStal"),
    "text for a number": ("spec.training.steps=many", "spec.training.steps: must be a whole number, not 'many'$"),
    "a number in quotes": ("spec.seed='1'", "spec.seed: must be a whole number, not '1'; remove the quotes$"),
    "a number in quotes for a number": (
        "spec.algorithm.clipLow='1e-1'",
        "spec.algorithm.clipLow: must be a number, not '1e-1'; remove the quotes$",
    ),
    "true in quotes": (
        "spec.tracking.tensorboard='true'",
        "spec.tracking.tensorboard: must be true or false, not 'true'; remove the quotes$",
    ),
    "a whole number beyond 64 bits": (
        "spec.seed=18446744073709551616",
        "spec.seed: must be at most 9007199254740991, not 18446744073709551616$",
    ),
    "a whole number that kubectl rounds": (
        "spec.seed=99999999999999999999",
        "spec.seed=99999999999999999999: line 1, column 1: '99999999999999999999' has more than 64 bits",
    ),
    "a small bound": ("spec.algorithm.clipLow=2.0", "spec.algorithm.clipLow: must be at most 1, not 2$"),
    "a fraction for a whole number": ("spec.seed=1.5", "spec.seed: must be a whole number, not 1.5"),
    "a negative number": ("spec.training.steps=-1", "spec.training.steps: must be at least 0, not -1"),
    "too large a number": ("spec.training.maxStaleness=65", "spec.training.maxStaleness: must be at most 64, not 65"),
    "zero where there must be some": ("spec.checkpoints.keep=0", "spec.checkpoints.keep: must be at least 1, not 0"),
    "a list for a mapping": ("spec.training=[1]", "spec.training: must be a mapping, not a list"),
    "a mapping for a list": ("spec.tasks={a: 1}", "spec.tasks: must be a list, not a mapping"),
    "null for something needed": ("spec.training=null", "spec.training: must be a mapping, not null"),
    "a word for true": ("spec.tracking.tensorboard=yes", "spec.tracking.tensorboard=yes: .* write true"),
    "text for true": (
        "spec.tracking.tensorboard='yes'",
        "spec.tracking.tensorboard: must be true or false, not 'yes'$",
    ),
    "no task": ("spec.tasks=[]", "spec.tasks: must have at least 1 entry, not 0"),
    "no model called policy": ("spec.models[policy].name=base", "spec.models: no model is named 'policy'"),
    "a name in capitals": (
        "metadata.name=Sums",
        "metadata.name: must consist of lower-case letters, digits and dashes",
    ),
    "a name that is a path": ("metadata.name=../other", "metadata.name: must consist of lower-case letters"),
    "an unknown preset": ("spec.algorithm.preset=a2c", "spec.algorithm.preset: must be .*'dr_grpo'.*, not 'a2c'"),
    "an unknown engine": ("spec.rollouts[0].engine=tgi", "spec.rollouts\\[0\\].engine: must be .*vllm.*, not 'tgi'"),
    "an unknown backend": ("spec.trainer.backend=deepspeed", "spec.trainer.backend: must be .*fsdp.*, not 'deepspeed'"),
    "no such reward": ("spec.tasks[0].reward=none", "spec.tasks\\[0\\].reward: 'none' is not defined"),
    "no such builtin reward": ("spec.rewards[0].builtin=magic", "spec.rewards\\[0\\].builtin: must be .*, not 'magic'"),
    "a reward of nothing": (
        "spec.rewards[0].builtin=null",
        "spec.rewards\\[0\\]: no scorer is given; give exactly",
    ),
    "two kinds of reward": (
        "spec.rewards[0].url=http://a",
        "spec.rewards\\[0\\]: builtin and url are given; give exactly",
    ),
    "an address without http": (
        "spec.rewards[0].url=a:80",
        "spec.rewards\\[0\\].url: must begin with http:// or https://",
    ),
    "two sources of data": (
        "spec.tasks[0].data.jsonl.path=a",
        "spec.tasks\\[0\\].data: reasoningGym and jsonl are given",
    ),
    "no source of data": ("spec.tasks[0].data={}", "spec.tasks\\[0\\].data: no source is given; give exactly one of"),
    "a path out of the storage": (
        "spec.models[0].source=job://../x",
        "source: 'job://../x' is not a path inside the stor",
    ),
    "a model far away": (
        "spec.models[0].source=gs://b/x",
        "spec.models\\[0\\].source: gs:// cannot be read; write job",
    ),
    "an open brace": ("spec.tasks[0].prompt='{question'", "spec.tasks\\[0\\].prompt: is not a template"),
    "a prompt without the problem": (
        "spec.tasks[0].prompt=hello",
        "prompt: the template names no column; put {question}",
    ),
    "no room for a prompt": ("spec.tasks[0].sampling.maxTokens=4096", "maxTokens: 4096 leaves no room for a prompt in"),
    "an argument that rljob sets": (
        'spec.rollouts[0].args=["--port=1"]',
        "spec.rollouts\\[0\\].args\\[0\\]: '--port=1' is governed by rljob",
    ),
    "a field of the engine's memory": (
        "spec.rollouts[0].kvCacheBytes=5",
        "kvCacheBytes: must be at least 1048576, not 5",
    ),
    "more minibatches than samples": ("spec.algorithm.minibatches=999", "spec.algorithm.minibatches: 999 is more than"),
    "nothing to do": (
        "spec.training.steps=0",
        "spec.training.steps: 0 only evaluates, and there is no evaluation; add",
    ),
    "an evaluation of no task": (
        "spec.evaluation.tasks=[none]",
        "evaluation.tasks\\[0\\]: 'none' is not defined",
    ),
    "pools for no evaluation": (
        "spec.evaluation.engines=dedicated",
        "evaluation.engines: dedicated needs a pool with purpose evaluation",
    ),
    "what is governed": (
        "spec.tasks[0].data.reasoningGym.config.seed=1",
        "config.seed: governed by the job; remove it",
    ),
    "what comes later": ("spec.rollouts[0].placement=Colocated", "spec.rollouts\\[0\\].placement: .*not supported yet"),
    "an option without a value": ("spec.seed", "--set spec.seed: write it as PATH=VALUE"),
    "an option for no entry": ("spec.tasks[none].weight=1", "--set .*: has no entry \\[none\\]; there are 1: sums"),
    "an option through a value": ("kind.x=1", "--set kind.x=1: kind: is a single value and has no x"),
    "an option that is no YAML": ("spec.seed=[", "--set spec.seed=\\[: line 1"),
}


def tree(path):
    return {str(file): file.read_bytes() if file.is_file() else None for file in path.rglob("*")}


@pytest.fixture
def rejected(monkeypatch, capsys, tmp_path):
    """Run a manifest of this text; check that nothing else has changed, and return the errors."""

    def command(text, *options):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "job.yaml").write_text(text)
        before = tree(tmp_path)
        monkeypatch.setattr(sys, "argv", ["rljob", "run", "job.yaml", *options])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        assert tree(tmp_path) == before
        assert process_cleanup.marked(str(tmp_path)) == []
        return err

    return command


def assert_sentences(err, sentence):
    assert "Traceback" not in err
    lines = err.splitlines()
    assert all(line.startswith("rljob: ") for line in lines)
    assert any(re.search(sentence, line) for line in lines), err


@pytest.mark.parametrize(("text", "sentence"), TEXTS.values(), ids=TEXTS)
def test_text_that_is_not_a_manifest_is_rejected(rejected, text, sentence):
    assert_sentences(rejected(text), sentence)


@pytest.mark.parametrize(("option", "sentence"), SETTINGS.values(), ids=SETTINGS)
def test_an_invalid_field_is_named(rejected, manifest, option, sentence):
    assert_sentences(rejected(write_yaml(manifest), "--set", option), sentence)


def test_all_errors_are_reported_at_once(rejected, manifest):
    options = [word for option in ("spec.sed=1", "spec.seed=x", "spec.tasks[0].weight=0") for word in ("--set", option)]
    assert len(rejected(write_yaml(manifest), *options).splitlines()) == 3


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MUTATIONS_OF_EACH = 50
STRANGE = (
    *(None, True, False, 0, -1, 1, 2**63, 10**30, 0.5, -0.0, 1e308),
    *("", " ", "yes", "a" * 5000, "\u0000", "{", "{}", "{question}"),
    *([], {}, [None], [[]], {"": {}}, {"name": None}, [{"name": "policy"}], "job://..", "--port", "🙂"),
)  # fmt: skip


def assert_rejected_or_valid(text="", data=None):
    """Check that a text, or data read from a text, is a valid job or rejected with sentences."""
    try:
        validate(data) if isinstance(data, dict) else loads(text)
    except ManifestError as error:
        assert error.problems
        assert all(problem and "\n" not in problem for problem in error.problems), error.problems


def mutate(value, dice):
    """Return ``value`` with a random part replaced, removed, duplicated or added."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(sorted(value))
        if dice.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        if dice.random() < 0.1:
            return value | {dice.choice(["", "x", key.upper(), f"{key}s", "name"]): dice.choice(STRANGE)}
        return value | {key: mutate(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        i = dice.randrange(len(value))
        if dice.random() < 0.2:
            return [*value, value[i]]
        return [*value[:i], mutate(value[i], dice), *value[i + 1 :]]
    return dice.choice(STRANGE)


@QUICK
@given(st.integers(0, 2**32))
def test_a_mutated_manifest_is_accepted_or_rejected_with_sentences(seed):
    dice = random.Random(seed)
    for _ in range(MUTATIONS_OF_EACH):
        data = MANIFEST
        for _ in range(dice.randint(1, 3)):
            data = mutate(data, dice)
        assert_rejected_or_valid(data=data)


@QUICK
@given(st.integers(0, 2**32))
def test_a_mutated_text_is_accepted_or_rejected_with_sentences(seed):
    dice = random.Random(seed)
    text = write_yaml(MANIFEST)
    for _ in range(MUTATIONS_OF_EACH // 5):  # reading text takes longer
        changed = list(text)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(changed))
            changed[at : at + dice.randint(0, 3)] = dice.choice(["", "\n", "\t", ":", "- ", "{", "]", "&a", "*a", "!", "'", "#", "%", "\x00", "é"])  # fmt: skip  # noqa: E501
        assert_rejected_or_valid("".join(changed))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=80))
def test_any_text_is_rejected_with_sentences(text):
    assert_rejected_or_valid(text)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(values(SCHEMA))
def test_data_that_the_schema_allows_is_accepted_or_rejected_with_sentences(data):
    assert_rejected_or_valid(data=data)
