"""CEL rules of the API server across fields of a manifest. :mod:`rljob.api.validation` has the rules in Python.

CEL has a cost budget, estimated from the bounds of lists and strings. The operator checks the rules that exceed the
budget or that CEL cannot express, and reports violations in the job's conditions. core/tests/crd_cases.py has one case
for each CEL rule and each Python rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rljob.api.algorithm_presets import PRESETS, ZERO_FOR_ONE_SAMPLE
from rljob.api.backend_checks import INDIVISIBLE, NEEDS_MEGATRON, NOT_MEGATRON
from rljob.api.kubernetes import GPUS
from rljob.api.model_address import HUB_FORM, HUB_PATTERN, S3_FORM, S3_PATTERN
from rljob.api.rewards import REWARDS
from rljob.api.tasks import SOURCES


@dataclass(frozen=True)
class CelRule:
    """A CEL validation rule.

    ``at``: path of the rule's schema, with [] for the entries of a list; ``self`` is the value at this path. ``field``:
    path of the invalid field below ``at`` (.steps). Messages contain no values: computing them in CEL would exceed the
    budget.
    """

    at: str
    rule: str
    message: str
    field: str = ""


def rules() -> Iterator[CelRule]:
    """Yield every rule for new and changed RLJobs."""
    yield from _spec()
    yield from _tasks()
    yield from _locations()
    yield from _services()
    yield from _settings()


def _spec() -> Iterator[CelRule]:
    evaluated = "has(self.evaluation)"
    dedicated = f"{evaluated} && self.evaluation.engines == 'dedicated'"
    purpose = "self.rollouts.exists(pool, pool.model == 'policy' && pool.purpose == '{}')"
    yield CelRule(
        "spec",
        "self.models.exists(model, model.name == 'policy')",
        "no model is named 'policy'; name the model to train 'policy'",
        ".models",
    )
    yield CelRule(
        "spec",
        "self.tasks.all(task, !has(task.reward) || self.rewards.exists(reward, reward.name == task.reward))",
        "the reward of a task is not defined; add it to rewards",
        ".tasks",
    )
    yield CelRule(
        "spec",
        "self.tasks.all(task, !has(task.environment) || "
        "self.environments.exists(entry, entry.name == task.environment.name))",
        "the environment of a task is not defined; add it to environments",
        ".tasks",
    )
    for field in ("referenceModel", "teacherModel"):
        name = f"self.algorithm.{field}"
        yield CelRule(
            "spec",
            f"!has({name}) || self.models.exists(model, model.name == {name})",
            "is not defined; name one of models",
            f".algorithm.{field}",
        )
    yield from _data_of_builtins()
    yield CelRule(
        "spec",
        f"!{evaluated} || !has(self.evaluation.tasks) || "
        "self.evaluation.tasks.all(name, self.tasks.exists(task, task.name == name))",
        "one of these tasks is not defined; name one of tasks",
        ".evaluation.tasks",
    )
    yield CelRule(
        "spec.evaluation",
        "self.samplesPerProblem == 1 || !has(self.temperature) || self.temperature > 0.0",
        "answers to a problem are equal at temperature 0; set 1, or a temperature above 0",
        ".samplesPerProblem",
    )
    yield CelRule(
        "spec.evaluation",
        "self.passAt.all(k, k <= self.samplesPerProblem)",
        "one of these is more than samplesPerProblem; raise it or lower the other",
        ".passAt",
    )
    yield CelRule(
        "spec",
        f"self.training.steps > 0 || {evaluated}",
        "0 only evaluates, and there is no evaluation; add evaluation, or train a step",
        ".training.steps",
    )
    yield CelRule(
        "spec",
        "self.tasks.all(task, self.rollouts.all(pool, pool.model != 'policy' || "
        "task.sampling.maxTokens < pool.maxModelLength))",
        "a task's sampling.maxTokens leaves no room for a prompt in a pool's maxModelLength; lower it or raise the "
        "other",
        ".tasks",
    )
    yield CelRule(
        "spec",
        purpose.format("training"),
        "no pool is for training; set purpose: training in one of them",
        ".rollouts",
    )
    yield CelRule(
        "spec",
        f"!({dedicated}) || {purpose.format('evaluation')}",
        "dedicated needs a pool with purpose evaluation; set purpose: evaluation in one of rollouts, or shared",
        ".evaluation.engines",
    )
    yield CelRule(
        "spec",
        f"({dedicated}) || !{purpose.format('evaluation')}",
        "evaluation.engines is not dedicated; set evaluation.engines: dedicated, or purpose: training",
        ".rollouts",
    )
    yield from _algorithm()


def _algorithm() -> Iterator[CelRule]:
    """Yield the rules that depend on one or two fields; rljob.api.algorithm_checks has all."""
    yield CelRule(
        "spec",
        "!has(self.algorithm.minibatches) || "
        "self.algorithm.minibatches <= self.training.promptsPerStep * self.training.samplesPerPrompt",
        "is more than the samples of a batch; lower it",
        ".algorithm.minibatches",
    )
    filtered = _chosen("groupFilter", {name: fields.get("group_filter", "none") for name, fields in PRESETS.items()})
    yield CelRule(
        "spec",
        f"self.training.samplesPerPrompt > 1 || !({filtered(['nonconstant'])})",
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
        ".algorithm.groupFilter",
    )
    yield CelRule(
        "spec",
        "self.training.samplesPerPrompt > 1 || self.tasks.all(task, !has(task.groupFilter.kind) || "
        "task.groupFilter.kind != 'nonconstant')",
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
        ".tasks",
    )
    yield CelRule(
        "spec.tasks[].groupFilter",
        "!has(self.minMean) || !has(self.maxMean) || self.minMean <= self.maxMean",
        "is above maxMean; lower it or raise the other",
        ".minMean",
    )
    advantage = _chosen("advantage", {name: fields["advantage"] for name, fields in PRESETS.items()})
    yield CelRule(
        "spec",
        f"self.training.samplesPerPrompt > 1 || !({advantage([*ZERO_FOR_ONE_SAMPLE])})",
        "1 makes every advantage 0 with this algorithm, so nothing is learned; set at least 2, or another "
        "algorithm.advantage",
        ".training.samplesPerPrompt",
    )
    uncorrected = _chosen("correction", {name: fields["correction"] for name, fields in PRESETS.items()})
    behavior = _chosen("ratio", {name: fields["ratio"] for name, fields in PRESETS.items()})
    yield CelRule(
        "spec",
        f"!({behavior(['behavior'])}) || ({uncorrected(['none'])})",
        "with ratio behavior the mismatch between engine and trainer is weighted twice; set correction: none, or "
        "ratio: proximal",
        ".algorithm.correction",
    )
    yield CelRule(
        "spec.algorithm",
        "!has(self.dualClip) || self.dualClip == 0.0 || self.dualClip > 1.0",
        "must be more than 1, or 0 for no bound",
        ".dualClip",
    )


def _chosen(field: str, of_presets: Mapping[str, str]) -> Callable[[list[str]], str]:
    """Return a function from values to the expression: the user's own value, or that of the preset, is one of them."""

    def is_one_of(values: list[str]) -> str:
        presets = [name for name, value in of_presets.items() if value in values]
        own = f"self.algorithm.{field}"
        return f"has({own}) ? {own} in {values} : self.algorithm.preset in {presets}"

    return is_one_of


def _data_of_builtins() -> Iterator[CelRule]:
    """Yield one rule for all built-in rewards that score the same data."""
    by_data: dict[frozenset[str], list[str]] = {}
    for name, kind in REWARDS.items():
        if kind.data is not None:
            by_data.setdefault(frozenset(kind.data), []).append(name)
    for data, names in by_data.items():
        fits = " || ".join(f"has(task.data.{source})" for source in SOURCES if source in data)
        named = " || ".join(f"reward.builtin == '{name}'" for name in names)
        yield CelRule(
            "spec",
            f"self.tasks.all(task, {fits} || !self.rewards.exists(reward, "
            f"has(task.reward) && reward.name == task.reward && has(reward.builtin) && ({named})))",
            f"a task's reward is the builtin {' or '.join(names)}, which scores {REWARDS[names[0]].accepted} data "
            "only; use another reward",
            ".tasks",
        )


def _tasks() -> Iterator[CelRule]:
    yield CelRule(
        "spec.tasks[]",
        "has(self.reward) || has(self.environment)",
        "required for a task without an environment; name one of rewards",
        ".reward",
    )
    yield CelRule(
        "spec.tasks[]",
        "self.loop != 'environment' || has(self.environment)",
        "the loop environment needs one; name one of environments, or set another loop",
        ".environment",
    )
    yield CelRule(
        "spec.tasks[].sampling",
        "self.minTokens < self.maxTokens",
        "is not less than maxTokens; lower it or raise the other",
        ".minTokens",
    )
    yield CelRule(
        "spec.tasks[].sampling",
        "!self.includeStop || self.stop.size() > 0",
        "there is no stop string; add stop, or remove it",
        ".includeStop",
    )
    yield CelRule(
        "spec.tasks[].data",
        f"{_given(SOURCES)}.exists_one(given, given)",
        f"give exactly one of {', '.join(SOURCES)}",
    )
    yield CelRule(
        "spec.tasks[].data",
        "!has(self.reasoningGym) || self.columns.size() == 0",
        "problems of reasoningGym always have question, answer and metadata; remove it",
        ".columns",
    )
    for source, other in (("jsonl", "heldOutPath"), ("parquet", "heldOutPath"), ("datasets", "heldOutSplit")):
        yield CelRule(
            f"spec.tasks[].data.{source}",
            f"!has(self.{other}) || !has(self.heldOutFraction) || self.heldOutFraction == 0.0",
            f"{other} is given too; give one of them",
            ".heldOutFraction",
        )
    yield CelRule(
        "spec.tasks[]",
        _at_most_one_of("prompt", "messages", "messagesColumn"),
        "a task has one of prompt, messages, messagesColumn",
    )
    yield CelRule(
        "spec.tasks[].messages",
        "self[self.size() - 1].role != 'assistant'",
        "the last message is the assistant's; end with the message that the model answers",
    )
    yield CelRule(
        "spec.tasks[].prompt",
        rf"self.matches(r'^([^{{}}]|{_BRACES}|\{{[^{{}}!:.\[\]]+:?\}})*$')",
        "is not a template: {column} stands for the value of a column; write {{ and }} for literal braces",
    )
    yield CelRule(
        "spec.tasks[].prompt",
        rf"self.matches(r'^([^{{}}]|{_BRACES})*(\{{[^{{]|[{{}}]$)')",
        "the template names no column; put {question} where the problem goes",
    )


def _locations() -> Iterator[CelRule]:
    """Yield rules for locations of models and files. In a cluster these locations must be in the job's storage."""
    yield CelRule(
        "spec.models[].source",
        f"!self.startsWith('hf://') || self.matches(r'{HUB_PATTERN}')",
        f"is not the address of a model; write {HUB_FORM}",
    )
    yield CelRule(
        "spec.models[].source",
        f"!self.startsWith('s3://') || self.matches(r'{S3_PATTERN}')",
        f"is not the address of a model; write {S3_FORM}",
    )
    for at in (
        "spec.models[].source",
        *(f"spec.tasks[].data.{table}.{field}" for table in ("jsonl", "parquet") for field in ("path", "heldOutPath")),
        "spec.tasks[].data.datasets.path",
    ):
        remote = " || self.startsWith('hf://') || self.startsWith('s3://')" if at == "spec.models[].source" else ""
        yield CelRule(
            at,
            f"self.startsWith('job://') || !self.contains('://'){remote}",
            "cannot be read; write job://PATH for a path in the storage",
        )
        yield CelRule(
            at,
            "self.contains('://')",
            "a path of one machine is for rljob run; in a cluster put it into the job's storage and write job://PATH",
        )
        yield _inside(at)
    yield _inside("spec.initializer.command[]")


def _inside(at: str) -> CelRule:
    outside = r"(?s)^job://(/|(\.?/)*\.?$|(.*/)?\.\.(/|$))"
    return CelRule(
        at,
        f"!self.matches(r'{outside}')",
        "is not a path inside the storage; write job://PATH without .. and a leading /",
    )


def _services() -> Iterator[CelRule]:
    forms = ("builtin", "function", "url", "local")
    has_form = " || ".join(f"has(self.{escaped(form)})" for form in (*forms, "template"))
    for owner in ("rewards[]", "environments[]"):
        yield CelRule(
            f"spec.{owner}",
            f"{_at_most_one_of(*forms)} && ({has_form})",
            "give exactly one of builtin, function, url, local",
        )
        for field in ("template", "egress"):
            yield CelRule(
                f"spec.{owner}",
                f"!has(self.url) || !has(self.{field})",
                "a service with url has no pod in the job; remove one of them",
                f".{field}",
            )
        yield CelRule(
            f"spec.{owner}",
            "!has(self.local) || has(self.template)",
            "is for rljob run; in a cluster give the service's container in template, or its url",
            ".local",
        )
    for owner in ("rewards[]", "environments[]", "rollouts[]", "runner"):
        yield CelRule(
            f"spec.{owner}.replicas",
            "!has(self.max) || self.max >= self.min",
            "is less than min; raise it or lower the other",
            ".max",
        )
    for owner in ("initializer", "rewards[]", "environments[]", "trainer", "rollouts[]", "runner", "coordinator"):
        yield CelRule(
            f"spec.{owner}.template.spec",
            "!has(self.restartPolicy)",
            "governed by rljob, which restarts processes itself; remove it",
            ".restartPolicy",
        )


def _settings() -> Iterator[CelRule]:
    for name in ("size", "className", "accessModes"):
        yield CelRule("spec.storage", f"!has(self.{name}) || !has(self.claim)", f"a storage has one of {name}, claim")
    yield CelRule(
        "spec.downloads", "!has(self.claim) || !self.emptyDir", "downloads have one of claim, emptyDir", ".emptyDir"
    )
    yield from _fabric()
    yield CelRule(
        "spec.trainer",
        "self.nodes * self.processesPerNode % self.parallelism.replicate == 0",
        "does not divide nodes × processesPerNode; every copy of the model needs the same number of processes",
        ".parallelism.replicate",
    )
    yield from _schedule()
    yield from _backends()
    for owner in ("network", "rewards[]", "environments[]"):
        yield CelRule(
            f"spec.{owner}.egress",
            "self.policy == 'Listed' || self.to.size() == 0",
            "policy Any allows all destinations; set policy: Listed, or remove it",
            ".to",
        )


def _schedule() -> Iterator[CelRule]:
    """Yield the rules for the learning rate."""
    at = "spec.trainer.optimizer"
    for field, given in (("scheduleSteps", "has(self.scheduleSteps)"), ("finalRatio", "self.finalRatio > 0.0")):
        message = "schedule constant does not read it; remove it, or set another schedule"
        yield CelRule(at, f"self.schedule != 'constant' || !({given})", message, f".{field}")
    yield CelRule(
        at,
        "self.schedule == 'constant' || has(self.scheduleSteps)",
        "every schedule except constant needs it; set it, usually to training.steps",
        ".scheduleSteps",
    )
    yield CelRule(
        at,
        "!has(self.scheduleSteps) || self.scheduleSteps > self.warmupSteps",
        "is not more than warmupSteps; raise it",
        ".scheduleSteps",
    )
    yield CelRule(
        at,
        "!has(self.scheduleSteps) || !has(self.decaySteps) || self.decaySteps <= self.scheduleSteps - self.warmupSteps",
        "is more than scheduleSteps − warmupSteps; lower it",
        ".decaySteps",
    )
    yield CelRule(
        at,
        "self.schedule != 'wsd' || has(self.decaySteps)",
        "schedule wsd needs it; set the number of steps in which the learning rate falls",
        ".decaySteps",
    )
    yield CelRule(
        at,
        "self.schedule == 'wsd' || !has(self.decaySteps)",
        "only schedule wsd reads it; remove it, or set schedule: wsd",
        ".decaySteps",
    )


def _backends() -> Iterator[CelRule]:
    """Yield the rules of :mod:`rljob.api.backend_checks`."""
    for name in ("tensor", "pipeline"):
        rule = f"self.backend != 'fsdp' || self.parallelism.{name} == 1"
        yield CelRule("spec.trainer", rule, NEEDS_MEGATRON, f".parallelism.{name}")
    yield CelRule(
        "spec.trainer",
        "self.backend == 'fsdp' || "
        "self.nodes * self.processesPerNode % (self.parallelism.tensor * self.parallelism.pipeline) == 0",
        INDIVISIBLE,
        ".parallelism",
    )
    supported = {
        ".parallelism.replicate": "self.parallelism.replicate == 1",
        ".recompute": "self.recompute == 'none'",
        ".lora": "!has(self.lora)",
        ".optimizer.offload": "!self.optimizer.offload",
        ".optimizer.decayed": "self.optimizer.decayed == 'all'",
    }
    for field, rule in supported.items():
        yield CelRule("spec.trainer", f"self.backend != 'megatron' || {rule}", NOT_MEGATRON, field)


def _fabric() -> Iterator[CelRule]:
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
    known = " || ".join(f"name.startsWith('{prefix}')" for prefix in prefixes)
    for role in ("trainer", "rollouts[]"):
        yield CelRule(
            f"spec.{role}.rdma.resource",
            f"self != '{GPUS}'",
            f"{GPUS} is requested by accelerator; name the resource of the network adapters",
        )
        yield CelRule(
            f"spec.{role}.nccl",
            f"self.all(name, {known})",
            f"a name does not begin with {', '.join(prefixes[:-1])} or {prefixes[-1]}; set other variables in template",
        )
    no_node_addresses = "self.network.policy == 'Enabled' && self.network.nodes.size() == 0"
    for field, uses_host_network in (
        (".trainer.hostNetwork", "self.trainer.hostNetwork"),
        (".rollouts", "self.rollouts.exists(pool, pool.hostNetwork)"),
    ):
        yield CelRule(
            "spec",
            f"!({no_node_addresses} && {uses_host_network})",
            "network policies would block pods with hostNetwork; give the addresses of nodes "
            "in network.nodes, or set network.policy: Disabled",
            field,
        )


_BRACES = r"\{\{|\}\}"


RESERVED = {"function", "if", "import", "in", "let", "loop", "namespace", "package", "return", "break", "continue"}
"""Names that CEL reserves; Kubernetes escapes a field of such a name."""


def escaped(field: str) -> str:
    """Return the name of a field in a CEL rule."""
    return f"__{field}__" if field in RESERVED else field


def _given(fields: tuple[str, ...]) -> str:
    return f"[{', '.join(f'has(self.{escaped(field)})' for field in fields)}]"


def _at_most_one_of(*fields: str) -> str:
    return f"{_given(fields)}.filter(given, given).size() <= 1"
