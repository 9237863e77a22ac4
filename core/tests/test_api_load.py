import json
import re
import sys
from types import SimpleNamespace

import pytest

from core.tests.manifests import WITH_TEACHER, entries_of
from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import (
    CONDITIONS,
    PRESETS,
    READERS,
    chosen,
    describe_needs,
    is_read,
    stabilizers,
    uses_critic,
)
from rljob.api.errors import ManifestError
from rljob.api.explain import explain, explain_field, fields, to_data
from rljob.api.load import load, loads, override, validate
from rljob.api.models import RLJob, RLJobSpec
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import write_yaml


def change(manifest, **values):
    """Set fields by path: spec__training__steps=5. A number between __ is an index; ... removes the field."""
    for path, value in values.items():
        here = manifest
        *way, last = (int(step) if step.isdecimal() else step for step in path.split("__"))
        for step in way:
            here = here[step] if isinstance(here, list) else here.setdefault(step, {})
        if value is ...:
            del here[last]
        else:
            here[last] = value
    return manifest


def problems(manifest):
    with pytest.raises(ManifestError) as caught:
        loads(write_yaml(manifest))
    return caught.value.problems


def test_the_smallest_manifest_loads(manifest):
    job = loads(write_yaml(manifest))
    assert job.metadata.name == "sums"
    assert job.spec.training.steps == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spec__training__steps": -1}, "spec.training.steps: must be at least 0, not -1"),
        ({"spec__training__steps": "5"}, "spec.training.steps: must be a whole number, not '5'"),
        ({"spec__training__steps": 1.5}, "spec.training.steps: must be a whole number, not 1.5"),
        ({"spec__training__steps": True}, "spec.training.steps: must be a whole number, not true"),
        ({"spec__training__steps": None}, "spec.training.steps: must be a whole number, not null; give it a value"),
        ({"spec__seed": None}, "spec.seed: must be a whole number, not null; leave it out for its default"),
        ({"spec__training__steps": ...}, "spec.training.steps: required; add it"),
        ({"spec__training": 5}, "spec.training: must be a mapping, not 5"),
        ({"spec__tasks": {}}, "spec.tasks: must be a list, not a mapping"),
        ({"spec__tasks": []}, "spec.tasks: must have at least 1 entry, not 0"),
        ({"spec__trainer__foo": 1}, "spec.trainer.foo: unknown field; there are backend, parallelism, nodes"),
        ({"spec__training__step": 1}, "spec.training.step: unknown field; did you mean steps?"),
        (
            {"spec__training__max_staleness": 1},
            "spec.training.max_staleness: unknown field; did you mean maxStaleness?",
        ),
        ({"spec__tasks__0__sampling__maxtokens": 1}, "spec.tasks[0].sampling.maxtokens: unknown field; did you mean m"),
        ({"spec__storage": {"size": "1Gi", "claim": "a"}}, "spec.storage.claim: size is given too; a storage has one"),
        ({"spec__storage__size": "1 GB"}, "spec.storage.size: must be an amount such as 10Gi, not '1 GB'"),
        (
            {"spec__rollouts__0__replicas": {"min": 2, "max": 1}},
            "spec.rollouts[0].replicas.max: 1 is less than min, 2; raise it or lower the other",
        ),
        (
            {"spec__rewards__0": {"name": "exact", "url": "http://a", "template": {}}},
            "spec.rewards[0].template: a service with url has no pod in the job; remove one of them",
        ),
        (
            {"spec__network__egress__to": [{"name": "a", "cidr": "10.0.0.0/8"}]},
            "spec.network.egress.to: policy Any allows all destinations; set policy: Listed, or remove it",
        ),
        (
            {"spec__network__allowFrom": [{"name": "a"}, {"name": "a"}]},
            "spec.network.allowFrom[1].name: 'a' is used twice; give every entry its own name",
        ),
        ({"metadata__name": "Sums"}, "metadata.name: must consist of lower-case letters, digits and dashes, first a l"),
        ({"metadata__name": 5}, "metadata.name: must be text, not 5; put it in quotes"),
        ({"metadata__name": "x" * 64}, "metadata.name: must have at most 63 characters, not 64"),
        ({"spec__algorithm__preset": "a2c"}, "spec.algorithm.preset: must be 'grpo', 'dr_grpo'"),
        ({"spec__algorithm__clipLow": 2}, "spec.algorithm.clipLow: must be at most 1, not 2"),
        ({"spec__trainer__optimizer__betas": [0.9]}, "spec.trainer.optimizer.betas[1]: required; add it"),
        ({"spec__models__0__source": ""}, "spec.models[0].source: is empty; give it a value"),
        (
            {"spec__models__0__source": "job://../x"},
            "spec.models[0].source: 'job://../x' is not a path inside the stor",
        ),
        ({"spec__models__0__name": "base"}, "spec.models: no model is named 'policy'; name the model to train"),
        ({"spec__tasks__0__reward": "x"}, "spec.tasks[0].reward: 'x' is not defined; there are exact; name one"),
        ({"spec__tasks__0__prompt": "hi"}, "spec.tasks[0].prompt: the template names no column; put {question} where"),
        (
            {"spec__tasks__0__data__reasoningGym__config__seed": 1},
            "spec.tasks[0].data.reasoningGym.config.seed: governed by the job; remove it and set spec.seed",
        ),
        (
            {"spec__tasks__0__sampling__maxTokens": 4096},
            "spec.tasks[0].sampling.maxTokens: 4096 leaves no room for a prompt in rollouts[0].maxModelLength 4096",
        ),
        (
            {"spec__tasks__0__sampling": {"maxTokens": 48, "minTokens": 48}},
            "spec.tasks[0].sampling.minTokens: 48 is not less than maxTokens, 48; lower it or raise the other",
        ),
        (
            {"spec__tasks__0__sampling": {"includeStop": True}},
            "spec.tasks[0].sampling.includeStop: there is no stop string; add stop, or remove it",
        ),
        ({"spec__tasks__0__sampling": {"stop": [""]}}, "spec.tasks[0].sampling.stop[0]: is empty; give it a value"),
        (
            {"spec__tasks__0__groupFilter": {"minMean": 0.9, "maxMean": 0.1}},
            "spec.tasks[0].groupFilter.minMean: 0.9 is above maxMean, 0.1; lower it or raise the other",
        ),
        ({"spec__evaluation__tasks": ["x"]}, "spec.evaluation.tasks[0]: 'x' is not defined; there are sums; name one"),
        ({"spec__evaluation__tasks": []}, "spec.evaluation.tasks: must have at least 1 entry, not 0"),
        ({"spec__algorithm__minibatches": 257}, "spec.algorithm.minibatches: 257 is more than the 256 samples of a b"),
        (
            {"spec__evaluation__tasks": ["sums", "sums"]},
            "spec.evaluation.tasks[1]: 'sums' is named twice; name it once",
        ),
        (
            {"spec__evaluation": {"temperature": 0, "samplesPerProblem": 4}},
            "spec.evaluation.samplesPerProblem: 4 answers to a problem are equal at temperature 0; set 1, or a te",
        ),
        (
            {"spec__evaluation": {"samplesPerProblem": 4, "passAt": [1, 8]}},
            "spec.evaluation.passAt[1]: 8 is more than samplesPerProblem, 4; raise it or lower the other",
        ),
        (
            {"spec__evaluation": {"samplesPerProblem": 4, "passAt": [4, 4]}},
            "spec.evaluation.passAt[1]: 4 is given twice; give it once",
        ),
        ({"spec__training__steps": 0}, "spec.training.steps: 0 only evaluates, and there is no evaluation; add"),
        ({"spec__models__0__source": "gs://bucket/x"}, "spec.models[0].source: gs:// cannot be read; write job://PATH"),
        ({"spec__rewards__0__builtin": ...}, "spec.rewards[0]: no scorer is given; give exactly one of builtin"),
        ({"spec__rewards__0__url": "http://a"}, "spec.rewards[0]: builtin and url are given; give exactly one of"),
        (
            {"spec__rewards__0": {"name": "exact", "url": "http://a", "config": {"column": "x"}}},
            "spec.rewards[0].config: applies to a builtin or a function only; remove it",
        ),
        (
            {"spec__rewards__0__url": "ftp://a"},
            "spec.rewards[0].url: must begin with http:// or https:// and a host, not 'ftp",
        ),
        (
            {"spec__checkpoints": {"uri": "gs://b/x"}},
            "spec.checkpoints.uri: must be s3://BUCKET/PREFIX, not 'gs://b/x'",
        ),
        ({"spec__tasks__0__data": {}}, "spec.tasks[0].data: no source is given; give exactly one of reasoningGym, js"),
        (
            {"spec__tasks__0__data__jsonl__path": "a.jsonl"},
            "spec.tasks[0].data: reasoningGym and jsonl are given; give exactly one of",
        ),
        (
            {"spec__tasks__0__data": {"jsonl": {"path": "job:///etc"}}},
            "spec.tasks[0].data.jsonl.path: 'job:///etc' is not a path inside the storage",
        ),
        (
            {"spec__tasks__0__data": {"parquet": {"path": "a", "heldOutPath": "b", "heldOutFraction": 0.5}}},
            "spec.tasks[0].data.parquet.heldOutFraction: heldOutPath is given too; give one of them",
        ),
        (
            {"spec__tasks__0__data": {"datasets": {"path": "a", "heldOutSplit": "b", "heldOutFraction": 0.5}}},
            "spec.tasks[0].data.datasets.heldOutFraction: heldOutSplit is given too; give one of them",
        ),
        ({"spec__tasks__0__prompt": "{0!r}"}, "spec.tasks[0].prompt: {0} is not a column name; write {{ and }}"),
        ({"spec__tasks__0__prompt": "{question"}, "spec.tasks[0].prompt: is not a template (expected '}' before end"),
        (
            {"spec__tasks__0__messages": [{"role": "user", "content": "{x}"}], "spec__tasks__0__prompt": "{x}"},
            "spec.tasks[0].messages: prompt is given too; a task has one of prompt, messages, messagesColumn",
        ),
        (
            {"spec__rollouts__0__purpose": "evaluation", "spec__evaluation__engines": "dedicated"},
            "spec.rollouts: no pool is for training; set purpose: training in one of them",
        ),
        (
            {"spec__evaluation__engines": "dedicated"},
            "spec.evaluation.engines: dedicated needs a pool with purpose evaluation; set pu",
        ),
        (
            {"spec__rollouts": [{"name": "a"}, {"name": "b", "purpose": "evaluation"}]},
            "spec.rollouts[1].purpose: evaluation.engines is not dedicated; set evaluation.engines: dedicated",
        ),
        ({"kind": "Job"}, "kind: must be 'RLJob', not 'Job'"),
        ({"kind": ...}, "kind: required; add kind: RLJob"),
        ({"apiVersion": ...}, "apiVersion: required; add apiVersion: rljob.dev/v1alpha1"),
        ({"spec": ...}, "spec: required; add it"),
    ],
)
def test_a_problem_is_one_sentence_that_begins_with_the_path_of_the_field(manifest, changes, sentence):
    (found,) = problems(change(manifest, **changes))
    assert found.startswith(sentence), found
    assert "\n" not in found


def test_all_problems_are_reported_at_once(manifest):
    change(manifest, spec__training__steps=-1, spec__trainer__foo=1)
    assert [line.partition(":")[0] for line in problems(manifest)] == ["spec.training.steps", "spec.trainer.foo"]
    change(manifest, spec__training__steps=1, spec__trainer=..., spec__tasks__0__reward="x", spec__tasks__0__prompt="")
    assert [line.partition(":")[0] for line in problems(manifest)] == ["spec.tasks[0].reward", "spec.tasks[0].prompt"]


def test_a_bare_yes_is_refused_with_its_line(manifest):
    text = write_yaml(manifest)
    (found,) = _refused(text.replace("name: sums\nspec", "name: on\nspec"))
    assert re.match(r"line 4, column 9: 'on' is .*put it in quotes", found)
    assert loads(text.replace("name: sums\nspec", "name: 'on'\nspec")).metadata.name == "on"


def _refused(text):
    with pytest.raises(ManifestError) as caught:
        loads(text)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the manifest is empty; it begins with apiVersion"),
        ("- a\n", "the manifest is not a mapping; it begins with apiVersion"),
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' is used twice; keep one"),
    ],
)
def test_text_without_a_manifest_is_refused_in_one_sentence(text, sentence):
    (found,) = _refused(text)
    assert found.startswith(sentence)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    with pytest.raises(ManifestError, match=r"none.yaml: there is no such file; give the path of a manifest$"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ManifestError, match=r"cannot be read: is a directory$"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ManifestError, match=r"latin.yaml: not UTF-8 at byte 3; save it as UTF-8$"):
        load(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("entry", "path", "value"),
    [
        ("spec.training.steps=5", ("spec", "training", "steps"), 5),
        ("spec.trainer.optimizer.learningRate=3e-4", ("spec", "trainer", "optimizer", "learningRate"), 3e-4),
        ("spec.tasks[0].weight=2", ("spec", "tasks", 0, "weight"), 2),
        ("spec.tasks[sums].weight=2", ("spec", "tasks", 0, "weight"), 2),
        ("spec.tasks[sums].prompt='a = b {question}'", ("spec", "tasks", 0, "prompt"), "a = b {question}"),
        ("spec.initializer.command=[a, b]", ("spec", "initializer", "command"), ["a", "b"]),
        ("spec.initializer.command[1]=c", ("spec", "initializer", "command", 1), "c"),
        ("spec.evaluation=null", ("spec", "evaluation"), None),
        ("spec.evaluation.passAt[0]=1", ("spec", "evaluation", "passAt"), [1]),
    ],
)
def test_an_override_sets_one_value(manifest, entry, path, value):
    override(manifest, entry)
    here = manifest
    for step in path:
        here = here[step]
    assert here == value
    validate(manifest)


def test_overrides_make_the_first_entry_of_a_missing_list(manifest):
    for entry in ("spec.algorithm.teachers[0].model=x", "spec.algorithm.teachers[0].weight=2"):
        override(manifest, entry)
    override(manifest, "spec.environments=[]")
    override(manifest, "spec.environments[0].name=lake")
    assert manifest["spec"]["algorithm"] == {"teachers": [{"model": "x", "weight": 2}]}
    assert manifest["spec"]["environments"] == [{"name": "lake"}]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("spec.training.steps", "--set spec.training.steps: write it as PATH=VALUE"),
        ("=5", "--set =5: write it as PATH=VALUE"),
        ("spec.tasks[=5", "--set spec.tasks[=5: write it as PATH=VALUE"),
        (
            "spec.tasks[other].weight=2",
            "--set spec.tasks[other].weight=2: spec.tasks: has no entry [other]; there",
        ),
        ("spec.tasks[1].weight=2", "--set spec.tasks[1].weight=2: spec.tasks: has no entry [1]; there are 1: sums"),
        ("spec.tasks.weight=2", "--set spec.tasks.weight=2: spec.tasks: is a list; choose an entry by index or name"),
        ("spec[training]=2", "--set spec[training]=2: spec: is a mapping; write .training"),
        (
            "spec.algorithm.teachers[1].model=a",
            "--set spec.algorithm.teachers[1].model=a: spec.algorithm.teachers: has no entry [1]; there are 0",
        ),
        (
            "spec.algorithm.teachers[big].model=a",
            "--set spec.algorithm.teachers[big].model=a: spec.algorithm.teachers: is not set; write .big for its field",
        ),
        ("kind.x=2", "--set kind.x=2: kind: is a single value and has no x"),
        ("spec.seed=[1", "--set spec.seed=[1: line 1, column 3: while parsing a flow sequence"),
    ],
)
def test_an_invalid_override_is_refused_in_one_sentence(manifest, entry, sentence):
    with pytest.raises(ManifestError) as caught:
        override(manifest, entry)
    assert str(caught.value).startswith(sentence)


def test_an_override_of_an_unknown_field_is_refused_by_validation(manifest):
    with pytest.raises(ManifestError, match=r"^spec.training.stepz: unknown field; did you mean steps\?$"):
        loads(write_yaml(manifest), ["spec.training.stepz=5"])


@pytest.mark.parametrize("preset", PRESETS)
def test_an_explained_manifest_loads_as_the_resolved_job(manifest, preset):
    change(manifest, spec__evaluation__everySteps=2)
    job = loads(write_yaml(manifest), entries_of(preset))
    assert loads(explain(job)) == resolve(job)
    assert resolve(resolve(job)) == resolve(job)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_every_governed_field_but_the_users_own_value_wins(manifest, preset):
    resolved = resolve(loads(write_yaml(manifest), entries_of(preset))).spec.algorithm
    empty = {name for name, value in resolved if value is None}
    assert empty == {field for field in Algorithm.model_fields if chosen(resolved, field) is None} | {
        field for field in (*READERS, *CONDITIONS) if not is_read(resolved, field)
    }
    own = [*entries_of(preset), "spec.algorithm.minibatches=2"]
    assert resolve(loads(write_yaml(manifest), own)).spec.algorithm.minibatches == 2


def test_null_turns_dual_clip_off_and_unset_is_the_presets(manifest):
    assert resolve(loads(write_yaml(manifest))).spec.algorithm.dual_clip == 3
    job = loads(write_yaml(manifest), ["spec.algorithm.dualClip=null"])
    assert job.spec.algorithm.dual_clip == resolve(job).spec.algorithm.dual_clip == 0
    assert job.model_dump(by_alias=True, exclude_defaults=True)["spec"]["algorithm"] == {"dualClip": 0}
    assert "dualClip" not in to_data(loads(write_yaml(manifest)))["spec"]["algorithm"]


def test_the_needs_of_an_algorithm_are_explained(manifest, monkeypatch):
    declared = SimpleNamespace(old=True, entropy=True, values=False)

    def needs(*overrides: str) -> str:
        return "; ".join(describe_needs(resolve(loads(write_yaml(manifest), overrides)).spec.algorithm))

    assert needs() == (
        "the algorithm needs the log-probabilities before the batch, which its first forward pass gives; "
        "samples whose advantage is 0 are not computed"
    )
    assert "one forward pass for each minibatch after the first" in needs("spec.algorithm.minibatches=2")
    assert needs("spec.algorithm.preset=topr") == "samples whose advantage is 0 are not computed"
    assert needs("spec.algorithm.preset=kimi").endswith("samples whose advantage is 0 are computed")
    assert needs("spec.algorithm.whitenAdvantages=true").endswith("samples whose advantage is 0 are computed")
    assert "the entropy at each token; samples whose advantage is 0 are computed" in needs(
        "spec.algorithm.entropyCoefficient=0.1"
    )
    assert "the needs of mine:f, which cannot be imported here, are" in needs("spec.algorithm.objective=mine:f")
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(f=SimpleNamespace(needs=declared), g=len))
    assert "mine:f needs the log-probabilities before the batch and the entropy" in needs(
        "spec.algorithm.objective=mine:f"
    )
    assert "mine:g declares no needs" in needs("spec.algorithm.objective=mine:g")
    assert needs("spec.algorithm.klCoefficient=0.1").endswith(
        "the algorithm needs the log-probabilities of the reference model (policy), one forward pass; samples whose "
        "advantage is 0 are computed"
    )
    assert "before the batch, one forward pass before the advantages" in needs(
        "spec.algorithm={klCoefficient: 0.1, klIn: reward}"
    )
    assert needs("spec.algorithm.objective=clip_cov") == (
        "the algorithm needs the log-probabilities before the batch, one forward pass before the advantages; samples "
        "whose advantage is 0 are computed"
    )
    assert "of the teacher model (big), one forward pass" in needs(*WITH_TEACHER)
    assert needs("spec.algorithm.preset=ppo").endswith(
        "the algorithm needs the values of a critic, which starts from the model policy and is trained: one forward "
        "pass before the advantages, and one update for each minibatch; samples whose advantage is 0 are computed"
    )


def test_kl_has_the_estimator_of_its_place_and_the_first_weights_as_reference(manifest):
    def algorithm(*overrides: str) -> Algorithm:
        return resolve(loads(write_yaml(manifest), overrides)).spec.algorithm

    plain = algorithm()
    assert plain.kl_in is plain.kl_estimator is plain.reference_model is None
    in_loss = algorithm("spec.algorithm.klCoefficient=0.1")
    assert (in_loss.kl_in, in_loss.kl_estimator, in_loss.reference_model) == ("loss", "k3", "policy")
    in_reward = algorithm("spec.algorithm={klCoefficient: 0.1, klIn: reward}")
    assert (in_reward.kl_in, in_reward.kl_estimator) == ("reward", "k1")
    assert [stabilizers(each) for each in (plain, in_loss, in_reward)] == [[], [], ["kl_coefficient"]]
    weighted = algorithm("spec.algorithm={truncatedWeight: 0.5, lengthExponent: 1}")
    assert stabilizers(weighted) == [], "they leave no sample out"


TEACHER_IN_A_POOL = (
    WITH_TEACHER[0],
    "spec.rollouts=[{name: main}, {name: large, model: big, maxModelLength: 100000}]",
    "spec.algorithm.teachers=[{pool: large}]",
)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("reward_mean", ("spec.algorithm={advantage: reward, rewardMean: batch}",)),
        ("reward_std", ("spec.algorithm={advantage: reward, rewardStd: running}",)),
        ("reward_clip", ("spec.algorithm.rewardClip=1",)),
        ("overlong_buffer", ("spec.algorithm.overlongBuffer=1",)),
        ("whiten_advantages", ("spec.algorithm.whitenAdvantages=true",)),
        ("advantage_clip", ("spec.algorithm.advantageClip=1",)),
        ("difficulty_above", ("spec.algorithm.difficultyAbove=0",)),
        ("difficulty_below", ("spec.algorithm.difficultyBelow=0",)),
        ("truncated_weight", ("spec.algorithm.truncatedWeight=0",)),
        ("difficulty_exponent", ("spec.algorithm.difficultyExponent=1",)),
        ("teachers", WITH_TEACHER),
        ("teachers", TEACHER_IN_A_POOL),
    ],
)
def test_the_audit_recomputes_no_advantages_that_a_field_changes(manifest, field, overrides):
    assert stabilizers(resolve(loads(write_yaml(manifest), overrides)).spec.algorithm) == [field]


def test_a_critic_follows_from_the_advantage_and_learns_with_the_lambda_of_the_policy(manifest):
    def job(*overrides: str) -> RLJobSpec:
        return resolve(loads(write_yaml(manifest), overrides)).spec

    plain = job().algorithm
    assert plain.critic_model is plain.value_clip is plain.value_lambda is plain.gae_lambda is None
    assert job().trainer.critic_optimizer is None and not uses_critic(plain)
    rate = "spec.trainer.optimizer.learningRate=0.1"
    ppo = job("spec.algorithm.preset=ppo", rate)
    found = ppo.algorithm
    assert (found.critic_model, found.critic_warmup_steps, found.value_clip) == ("policy", 0, 0.5)
    assert (found.gae_lambda, found.value_lambda, found.discount, found.whiten_advantages) == (1, 1, 1, True)
    assert ppo.trainer.critic_optimizer == ppo.trainer.optimizer
    own = job("spec.algorithm.preset=ppo", rate, "spec.trainer.criticOptimizer.weightDecay=0.5").trainer
    assert (own.critic_optimizer.learning_rate, own.critic_optimizer.weight_decay) == (1e-6, 0.5)
    shorter = job("spec.algorithm={preset: ppo, gaeLambda: 0.9}").algorithm
    assert (shorter.gae_lambda, shorter.value_lambda, shorter.gae_length_factor) == (0.9, 0.9, None)
    adaptive = job("spec.algorithm={preset: ppo, gaeLengthFactor: 0.05}").algorithm
    assert (adaptive.gae_lambda, adaptive.value_lambda, adaptive.gae_length_factor) == (None, 1, 0.05)
    of_user = job("spec.algorithm={advantage: 'mine:f', criticModel: policy}").algorithm
    assert (of_user.critic_model, of_user.value_lambda, of_user.value_clip) == ("policy", 1, 0.5)
    assert job("spec.algorithm.advantage='mine:f'").algorithm.critic_model is None


def test_the_resolved_job_survives_json(manifest):
    job = resolve(loads(write_yaml(manifest)))
    assert RLJob.model_validate_json(job.model_dump_json(by_alias=True)) == job


def test_every_field_is_documented_with_its_type():
    known = fields()
    assert len(known) > 80
    for field in known.values():
        assert field.kind, field.path
        assert field.meaning, field.path


def test_every_field_can_be_set_in_a_file(manifest):
    """Every field is loaded under the name under which it is dumped: aliases and loader agree."""
    data = to_data(resolve(loads(write_yaml(change(manifest, spec__evaluation__everySteps=1)))))
    assert to_data(validate(json.loads(json.dumps(data)))) == data


def test_every_list_mapping_and_text_is_bounded():
    schema = RLJob.model_json_schema(by_alias=True)
    unbounded = []

    def visit(node, path):
        if isinstance(node, dict):
            kind = node.get("type")
            closed = "enum" in node or "const" in node or "properties" in node or path.endswith(".template")
            if kind == "array" and "maxItems" not in node:
                unbounded.append(path)
            if kind == "object" and not closed and "maxProperties" not in node:
                unbounded.append(path)
            if kind == "string" and not closed and "maxLength" not in node:
                unbounded.append(path)
            for key, value in node.items():
                named = key not in ("properties", "anyOf", "items", "$defs")
                visit(value, f"{path}.{key}" if named else path)
        elif isinstance(node, list):
            for value in node:
                visit(value, path)

    visit(schema, "")
    assert unbounded == []


def test_a_field_is_explained_by_path_with_or_without_index():
    text = explain_field("spec.tasks[0].sampling.temperature")
    assert text == explain_field("spec.tasks.sampling.temperature")
    assert text.startswith("spec.tasks.sampling.temperature: number > 0 and ≤ 10; default 1.0\n\nSoftmax temperature")
    assert "  maxTokens " in explain_field("spec.tasks.sampling")
    with pytest.raises(ManifestError, match=r"unknown field; did you mean spec.training\?"):
        explain_field("spec.trainning")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("spec.tasks[0].data.columns={'a\\n': 1}", r"spec.tasks[0].data.columns.a\n: must be text, not 1"),
        ("spec.trainer.template={'a\\nb': 1}", r"spec.trainer.template.a\nb: unknown field"),
    ],
)
def test_line_ends_in_names_and_values_are_escaped(manifest, change, problem):
    change = change.replace("'", '"')
    with pytest.raises(ManifestError) as caught:
        loads(write_yaml(manifest), [change])
    assert caught.value.problems[0].startswith(problem)
