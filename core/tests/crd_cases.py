"""Invalid manifests, one case for each rule, with the message of rljob when it loads the manifest, and the message of
the API server when it receives the RLJob. Used by test_api_crd.py and by e2e/integration/test_crd_rules.py.

If the API server cannot check a rule, `why` is the reason; the operator then reports the problem in the job's
conditions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from core.tests.manifests import MANIFEST, WITH_TEACHER
from rljob.api.load import override

LISTED = "a list map: the API server names the duplicate entry"
SCHEMA = "a bound of the schema: the API server has its own message"
UNTYPED = "CEL cannot read mappings of untyped values"
BUDGET = "over CEL's budget"
MANY = "too many combinations for CEL rules: the operator reports it"
KEYS = "a structural schema has no bound for keys"
WRITTEN_NULL = "the API server drops null and fills in the default"
ONLY_IN_A_CLUSTER = "`rljob run` accepts it; the operator refuses it too"


@dataclass(frozen=True)
class Case:
    """A change of the smallest manifest (entries as for --set), and a part of the message about it.

    ``message``: of rljob; empty: rljob accepts the manifest. ``server``: of the API server if it differs; empty: the
    API server accepts the manifest. ``why``: reason why the two differ.
    """

    name: str
    change: tuple[str, ...]
    message: str
    server: str | None = None
    why: str = ""

    @property
    def server_message(self) -> str:
        """Part of the API server's message; empty: it accepts the manifest."""
        return self.message if self.server is None else self.server


def changed(change: tuple[str, ...]) -> dict[str, Any]:
    """Return the smallest manifest with ``change`` applied."""
    data = copy.deepcopy(MANIFEST)
    for entry in change:
        override(data, entry)
    return data


def _jsonl(*fields: str) -> str:
    return f"spec.tasks[0].data={{jsonl: {{path: 'job://rows', {', '.join(fields)}}}}}"


_TWO_PROCESSES = ("spec.trainer.processesPerNode=2",)
_NEEDS_MEGATRON, _NOT_MEGATRON = "needs backend megatron; set it", "is not supported by backend megatron; remove it"
_TWO_MODELS = WITH_TEACHER[0]
_POOL = (_TWO_MODELS, "spec.rollouts=[{name: a}, {name: b, model: big, maxModelLength: 100000}]")
_TWO_TASKS = (
    "spec.tasks=[{name: sums, data: {reasoningGym: {dataset: chain_sum}}, reward: exact},"
    " {name: more, data: {reasoningGym: {dataset: products}}, reward: exact}]"
)
_EXACT = "spec.rewards[0].builtin=exact_match"
_ACTING = (
    "spec.environments=[{name: lake, builtin: frozen_lake}]",
    "spec.tasks[0].environment={name: lake}",
    "spec.tasks[0].loop=environment",
    "spec.tasks[0].data={seeds: {}}",
    "spec.tasks[0].reward=null",
)
_AGENT = (
    "spec.tasks[0].agent={function: 'mine.agent:solve'}",
    "spec.tasks[0].loop=agent",
)
_KUEUE = "spec.scheduling.gang={provider: kueue, queue: mine}"
_SCALED = (
    ("a reward", "rewards[0]", ()),
    ("an environment", "environments[0]", _ACTING),
    ("a pool", "rollouts[0]", ()),
    ("the runner", "runner", ()),
)
"""What may be scaled: words, its field, and what it needs."""
_TEMPLATE = "{spec: {containers: [{name: main, image: mine}]}}"

GOOD = [
    Case("the smallest manifest", (), ""),
    Case("null for optional fields", ("spec.algorithm.dualClip=null", "spec.evaluation=null"), ""),
    Case("fields of a preset set by the user", ("spec.algorithm={preset: dr_grpo, clipLow: 0.3, minibatches: 2}",), ""),
    Case("KL-Cov with several updates", ("spec.algorithm={objective: kl_cov, minibatches: 2}",), ""),
    Case("no dual clip", ("spec.algorithm.dualClip=0",), ""),
    Case("a preset whose ratio is behavior", ("spec.algorithm.preset=topr",), ""),
    Case("ratio behavior without a correction", ("spec.algorithm={ratio: behavior, correction: none}",), ""),
    Case("fields that a function of the user may read", ("spec.algorithm={objective: 'mine:f', gatePositive: 2}",), ""),
    Case(
        "two replicas of two stages of two processes",
        ("spec.trainer={backend: megatron, processesPerNode: 8, parallelism: {tensor: 2, pipeline: 2}}",),
        "",
    ),
    Case(
        "two groups of layers in two stages, parts of samples, and experts on four processes",
        (
            "spec.trainer={backend: megatron, processesPerNode: 8, parallelism: "
            "{pipeline: 2, virtualPipeline: 2, context: 2, expert: 4}}",
        ),
        "",
    ),
    Case(
        "a critic and a reference of Megatron-Core",
        ("spec.algorithm={preset: ppo, klCoefficient: 0.1}", "spec.trainer.backend=megatron"),
        "",
    ),
    Case(
        "packed and recomputed by Megatron-Core",
        ("spec.trainer={backend: megatron, packing: varlen, recompute: layer}",),
        "",
    ),
    Case("two copies of the model", ("spec.trainer={nodes: 2, processesPerNode: 3, parallelism: {replicate: 2}}",), ""),
    Case(
        "an engine on two hosts",
        ("spec.rollouts[0].hosts=2", "spec.rollouts[0].parallelism={tensor: 8, pipeline: 2}"),
        "",
    ),
    Case("rows of a file, a fraction held out", (_EXACT, _jsonl("heldOutFraction: 0.2")), ""),
    Case("rows of two files", (_EXACT, _jsonl("heldOutPath: 'job://other'", "heldOutFraction: 0")), ""),
    Case("braces in a prompt", ("spec.tasks[0].prompt='{{a}} {question}}} {b c:}'",), ""),
    Case("a chat", ("spec.tasks[0].messages=[{role: user, content: '{question}'}]",), ""),
    Case("a path with dots that stays in the storage", ("spec.models[0].source='job://a/./...b/..c'",), ""),
    Case(
        "a reward of your own in a cluster",
        (f"spec.rewards=[{{name: exact, template: {_TEMPLATE}, local: {{command: [serve]}}}}]",),
        "",
    ),
    Case("a model of the Hub", ("spec.models[0].source='hf://Qwen/Qwen3-0.6B@refs/pr/1'",), ""),
    Case("a model in S3", ("spec.models[0].source='s3://my.bucket/a/b c/'",), ""),
    Case(
        "an environment of your own in a cluster",
        (f"spec.environments=[{{name: maze, template: {_TEMPLATE}, local: {{command: [serve]}}}}]",),
        "",
    ),
    Case(
        "an agent with a command",
        ("spec.tasks[0].agent={command: [solve, '{question}', '{{}}']}", "spec.tasks[0].loop=agent"),
        "",
    ),
    Case("an agent without a reward", (*_AGENT, "spec.tasks[0].reward=null"), ""),
    Case("a reward service outside the job", ("spec.rewards=[{name: exact, url: 'http://scores.example:80/x'}]",), ""),
    Case(
        "a frozen pool",
        (
            "spec.models=[{name: policy, source: 'job://m'}, {name: big, source: 'job://b'}]",
            "spec.rollouts=[{name: a}, {name: b, model: big, maxModelLength: 64}]",
        ),
        "",
    ),
    Case("a teacher in a pool", (*_POOL, "spec.algorithm={preset: distillation, teachers: [{pool: b}]}"), ""),
    Case("a reference in a pool", (*_POOL, "spec.algorithm={klCoefficient: 0.1, referencePool: b}"), ""),
    Case(
        "dedicated evaluation",
        ("spec.evaluation={engines: dedicated}", "spec.rollouts=[{name: a}, {name: b, purpose: evaluation}]"),
        "",
    ),
    Case("one sample per prompt with GRPO", ("spec.training.samplesPerPrompt=1",), ""),
    Case("a schedule", ("spec.trainer.optimizer={schedule: cosine, scheduleSteps: 9, finalRatio: 0.1}",), ""),
    Case("a schedule with decay", ("spec.trainer.optimizer={schedule: wsd, scheduleSteps: 9, decaySteps: 9}",), ""),
    Case(
        "one sample per prompt with Dr. GRPO and another advantage",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm={preset: dr_grpo, advantage: 'mine:advantage'}"),
        "",
    ),
    Case("KL to the first weights in the loss", ("spec.algorithm={klCoefficient: 0.1, klEstimator: k2}",), ""),
    Case(
        "KL to another model in the reward",
        (_TWO_MODELS, "spec.algorithm={klCoefficient: 0.1, klIn: reward, referenceModel: big}"),
        "",
    ),
    Case("a teacher alone", (_TWO_MODELS, "spec.algorithm={preset: distillation, teachers: [{model: big}]}"), ""),
    Case("a teacher and rewards", (_TWO_MODELS, "spec.algorithm.teachers=[{model: big, weight: 0.1}]"), ""),
    Case(
        "a teacher in the trainer and one in a pool",
        (*_POOL, "spec.algorithm={preset: distillation, teachers: [{model: big}, {pool: b, tasks: [sums]}]}"),
        "",
    ),
    Case(
        "a reference for a function of the user",
        (_TWO_MODELS, "spec.algorithm={objective: 'mine:f', referenceModel: big}"),
        "",
    ),
    Case("PPO with one sample per prompt", ("spec.algorithm.preset=ppo", "spec.training.samplesPerPrompt=1"), ""),
    Case(
        "PPO with fields of its critic",
        (
            _TWO_MODELS,
            "spec.algorithm={preset: ppo, criticModel: big, criticWarmupSteps: 1, valueClip: 0, valueLambda: 1}",
            "spec.trainer={lora: {rank: 4}, criticOptimizer: {learningRate: 0.1, schedule: linear, scheduleSteps: 9}}",
        ),
        "",
    ),
    Case(
        "a critic for an advantage of the user",
        ("spec.algorithm={advantage: 'mine:f', criticModel: policy, valueLambda: 0.9}",),
        "",
    ),
    Case("bounds of a group filter", ("spec.tasks[0].groupFilter={kind: none, minMean: 0.1, maxMean: 0.9}",), ""),
    Case("a group filter of the user", ("spec.tasks[0].groupFilter={function: 'mypackage.filter:few_best'}",), ""),
    Case("stop strings", ("spec.tasks[0].sampling={stop: [END], minTokens: 2, includeStop: true}",), ""),
    Case("greedy evaluation", ("spec.evaluation={temperature: 0, passAt: [1]}",), ""),
    Case("several answers", ("spec.evaluation={temperature: 0.5, samplesPerProblem: 4, passAt: [4, 1]}",), ""),
    Case("only evaluation", ("spec.training.steps=0", "spec.evaluation={tasks: [sums]}"), ""),
    Case(
        "templates with quantities, null and keyed lists",
        (
            "spec.trainer.template={metadata: {labels: {team: a}}, spec: {nodeSelector: {x: null}, volumes: "
            "[{name: v, emptyDir: {sizeLimit: 1Gi}}], containers: [{name: main, securityContext: null, env: "
            "[{name: A, value: b}], volumeMounts: [{mountPath: /v, name: v}], resources: {limits: {cpu: 2, memory: "
            "1Gi}}, livenessProbe: {httpGet: {port: http}}}]}}",
        ),
        "",
    ),
    Case(
        "RDMA adapters and NCCL variables",
        (
            "spec.trainer={sharedMemory: 16Gi, rdma: {resource: rdma/hca_0, count: 8}, nccl: {NCCL_IB_HCA: mlx5}}",
            "spec.rollouts[0].nccl={TORCH_NCCL_DEBUG: a, FI_PROVIDER: efa}",
        ),
        "",
    ),
    Case(
        "accelerator profiles",
        (
            "spec.trainer.accelerator.profile=h100",
            "spec.rollouts[0].accelerator={kind: nvidia, profile: h100}",
        ),
        "",
    ),
    Case(
        "hostNetwork with addresses of nodes",
        ("spec.trainer.hostNetwork=true", "spec.network.nodes=[{name: all, cidr: 10.0.0.0/8}]"),
        "",
    ),
    Case(
        "hostNetwork without network policies",
        ("spec.rollouts[0].hostNetwork=true", "spec.network.policy=Disabled"),
        "",
    ),
    Case(
        "listed egress destinations",
        ("spec.network={egress: {policy: Listed, to: [{name: a, cidr: 10.0.0.0/8}]}}",),
        "",
    ),
    Case(
        "destinations of a reward",
        ("spec.rewards[0].egress={policy: Listed, to: [{name: a, cidr: 10.0.0.0/8}]}",),
        "",
    ),
    Case("the longest name", (f"metadata.name={'a' * 63}",), ""),
    Case("centered rewards that are clipped", ("spec.algorithm={rewardMean: batch, rewardClip: 1}",), ""),
    Case("centered rewards whose sign counts", ("spec.algorithm={objective: topr, rewardMean: batch}",), ""),
    Case(
        "centered rewards of discounted returns",
        ("spec.algorithm={advantage: reinforce_pp, rewardMean: batch, discount: 0.9}",),
        "",
    ),
    Case("rewards of Lite PPO centered by group", ("spec.algorithm={advantage: lite_ppo, rewardMean: group}",), ""),
    Case(
        "rewards of Lite PPO scaled by group",
        ("spec.algorithm={advantage: lite_ppo, rewardMean: batch, rewardStd: group}",),
        "",
    ),
    Case(
        "scaled rewards beside a punishment",
        ("spec.algorithm={advantage: lite_ppo, rewardStd: batch, overlongBuffer: 9}",),
        "",
    ),
    Case(
        "scaled rewards of several turns",
        (*_ACTING, "spec.algorithm={advantage: reinforce_pp, rewardStd: batch}"),
        "",
    ),
    Case("whitened advantages of Lite PPO", ("spec.algorithm={advantage: lite_ppo, whitenAdvantages: true}",), ""),
    Case("advantages that are whitened once", ("spec.algorithm={preset: reinforce_pp, whitenAdvantages: false}",), ""),
    Case(
        "one sample per prompt with a teacher",
        (_TWO_MODELS, "spec.training.samplesPerPrompt=1", "spec.algorithm={preset: dr_grpo, teachers: [{model: big}]}"),
        "",
    ),
    Case(
        "one sample per prompt with the likelihood of positive samples",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm={preset: dr_grpo, positiveCoefficient: 0.1}"),
        "",
    ),
    Case(
        "distillation of difficult problems without constant groups",
        (
            _TWO_MODELS,
            "spec.algorithm={preset: distillation, teachers: [{model: big}], difficultyExponent: 1, "
            "groupFilter: nonconstant}",
        ),
        "",
    ),
    Case("ratio proximal with a correction", ("spec.algorithm={preset: cispo, ratio: proximal, correction: tis}",), ""),
    Case(
        "ratio proximal without a correction", ("spec.algorithm={preset: topr, ratio: proximal, correction: none}",), ""
    ),
    Case(
        "ratio proximal of samples that are not stale",
        ("spec.algorithm={preset: cispo, ratio: proximal}", "spec.training.maxStaleness=0"),
        "",
    ),
    Case("scaled rewards beside KL", ("spec.algorithm={rewardStd: batch, klCoefficient: 1, klIn: reward}",), ""),
    Case(
        "distillation of difficult problems by bounded rewards",
        (
            _TWO_MODELS,
            "spec.algorithm={preset: distillation, teachers: [{model: big}], difficultyExponent: 1, rewardClip: 1}",
        ),
        "",
    ),
    Case(
        "a teacher in a pool of sequences with one token more than those of the policy",
        (*_POOL, "spec.algorithm.teachers=[{pool: b}]", "spec.rollouts[1].maxModelLength=4097"),
        "",
    ),
]
"""Manifests that rljob and the API server accept."""

FIELDS = [
    Case(
        "no model is named policy",
        ("spec.models[0].name=base",),
        "no model is named 'policy'; name the model to train 'policy'",
    ),
    Case("a reward that is not defined", ("spec.tasks[0].reward=none",), "is not defined"),
    Case(
        "a task without a reward and an environment",
        ("spec.tasks[0].reward=null",),
        "required for a task without an environment or an agent; name one of rewards",
    ),
    Case(
        "an environment that is not defined",
        (*_ACTING, "spec.tasks[0].environment.name=maze"),
        "is not defined",
    ),
    Case(
        "the loop of environments without one",
        ("spec.tasks[0].loop=environment",),
        "the loop environment needs one; name one of environments, or set another loop",
    ),
    Case(
        "an environment with a loop that makes no step in it",
        (*_ACTING, "spec.tasks[0].loop=single_turn"),
        "tasks[0].loop: single_turn makes no step in an environment; set loop: environment",
        "",
        MANY,
    ),
    Case(
        "an environment with the chat of a column",
        (*_ACTING, "spec.tasks[0].messagesColumn=chat"),
        "tasks[0].messagesColumn: the chat of a column has no place for the first observation",
        "",
        MANY,
    ),
    Case(
        "a prompt without the observation",
        (*_ACTING, "spec.tasks[0].prompt='{seed}'"),
        "tasks[0].prompt: the template does not name the observation",
        "",
        MANY,
    ),
    Case(
        "an observation that is no template",
        (*_ACTING, "spec.tasks[0].environment.observation='{'"),
        "tasks[0].environment.observation: is not a template",
        "",
        MANY,
    ),
    Case(
        "the loop of agents without one",
        ("spec.tasks[0].loop=agent",),
        "the loop agent needs one; name its program, or set another loop",
    ),
    Case(
        "an agent with a loop that starts none",
        (*_AGENT, "spec.tasks[0].loop=single_turn"),
        "starts no agent; set loop: agent",
    ),
    Case(
        "an agent beside an environment",
        (*_ACTING, *_AGENT),
        "a task has an environment or an agent; remove one of them",
    ),
    Case(
        "an agent with a prompt",
        (*_AGENT, "spec.tasks[0].prompt='{question}'"),
        "the agent writes the messages itself; remove",
    ),
    Case(
        "an agent without a program",
        (*_AGENT, "spec.tasks[0].agent={}"),
        "give exactly one of function, command",
    ),
    Case(
        "an agent with two programs",
        (*_AGENT, "spec.tasks[0].agent.command=[solve]"),
        "give exactly one of function, command",
    ),
    Case(
        "an agent with a command and no reward",
        ("spec.tasks[0].agent={command: [solve]}", "spec.tasks[0].loop=agent", "spec.tasks[0].reward=null"),
        "required for an agent with a command, which returns no reward",
    ),
    Case(
        "an agent whose command has an invalid template",
        ("spec.tasks[0].agent={command: [solve, '{a.b}']}", "spec.tasks[0].loop=agent"),
        "agent.command[1]: {a.b} is not a column name",
        "",
        MANY,
    ),
    Case(
        "a group filter of an invalid reference",
        ("spec.tasks[0].groupFilter.function=few_best",),
        "must be module:attribute of your own package",
        "should match",
        SCHEMA,
    ),
    Case(
        "an agent of an invalid reference",
        (*_AGENT, "spec.tasks[0].agent.function=solve"),
        "must be module:attribute of your own package",
        "should match",
        SCHEMA,
    ),
    Case(
        "an environment with two forms",
        (*_ACTING, "spec.environments[0].url=http://a"),
        "give exactly one of builtin, function, url, local",
    ),
    Case(
        "an environment without a form",
        ("spec.environments=[{name: lake}]",),
        "give exactly one of builtin, function, url, local",
    ),
    Case(
        "a pod for an environment outside the job",
        (f"spec.environments=[{{name: lake, url: 'http://a', template: {_TEMPLATE}}}]",),
        "a service with url has no pod in the job; remove one of them",
    ),
    Case(
        "an environment of your own without a pod",
        ("spec.environments=[{name: lake, local: {command: [serve]}}]",),
        "",
        "is for rljob run; in a cluster give the service's container in template, or its url",
        ONLY_IN_A_CLUSTER,
    ),
    Case(
        "max environment pods below min",
        (*_ACTING, "spec.environments[0].replicas={min: 2, max: 1}"),
        "is less than min",
    ),
    Case(
        "an unknown option of an environment",
        (*_ACTING, "spec.environments[0].config.sise=4"),
        "environments[0].config.sise: unknown field; did you mean size?",
        "",
        UNTYPED,
    ),
    Case(
        "options of an environment outside the job",
        ("spec.environments=[{name: lake, url: 'http://a', config: {size: 4}}]",),
        "environments[0].config: applies to a builtin or a function only",
        "",
        MANY,
    ),
    Case(
        "data that reasoning_gym cannot score",
        (_jsonl(),),
        "is the builtin reasoning_gym, which scores reasoningGym data only; use another reward",
    ),
    Case(
        "a minimum length that is not less than the maximum",
        ("spec.tasks[0].sampling={maxTokens: 8, minTokens: 8}",),
        "is not less than maxTokens",
    ),
    Case(
        "the text of stop strings without one",
        ("spec.tasks[0].sampling={includeStop: true}",),
        "there is no stop string; add stop, or remove it",
    ),
    Case(
        "bounds of a group filter that exclude all groups",
        ("spec.tasks[0].groupFilter={minMean: 0.9, maxMean: 0.1}",),
        "tasks[0].groupFilter.minMean: 0.9 is above maxMean, 0.1; lower it or raise the other",
        "is above maxMean; lower it or raise the other",
        "CEL messages contain no values",
    ),
    Case(
        "groups of one sample and a task's filter of constant groups",
        ("spec.training.samplesPerPrompt=1", "spec.tasks[0].groupFilter.kind=nonconstant"),
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
    ),
    Case("an evaluation task that is not defined", ("spec.evaluation.tasks=[none]",), "; name one of tasks"),
    Case(
        "a task evaluated twice",
        ("spec.evaluation.tasks=[sums, sums]",),
        "'sums' is named twice; name it once",
        "Duplicate value",
        LISTED,
    ),
    Case(
        "several greedy answers",
        ("spec.evaluation={temperature: 0, samplesPerProblem: 2}",),
        "answers to a problem are equal at temperature 0; set 1, or a temperature above 0",
    ),
    Case(
        "pass@k of more answers than there are",
        ("spec.evaluation={samplesPerProblem: 2, passAt: [1, 4]}",),
        "evaluation.passAt[1]: 4 is more than samplesPerProblem, 2; raise it or lower the other",
        "one of these is more than samplesPerProblem; raise it or lower the other",
        "CEL messages contain no values",
    ),
    Case(
        "pass@k twice",
        ("spec.evaluation={samplesPerProblem: 2, passAt: [2, 2]}",),
        "evaluation.passAt[1]: 2 is given twice; give it once",
        "Duplicate value",
        LISTED,
    ),
    Case(
        "neither training nor evaluation",
        ("spec.training.steps=0",),
        "0 only evaluates, and there is no evaluation; add evaluation, or train a step",
    ),
    Case(
        "no room for a prompt",
        ("spec.rollouts[0].maxModelLength=256",),
        "leaves no room for a prompt in",
    ),
    Case(
        "no pool for training",
        ("spec.rollouts[0].purpose=evaluation", "spec.evaluation.engines=dedicated"),
        "no pool is for training; set purpose: training in one of them",
    ),
    Case(
        "no pool for evaluation",
        ("spec.evaluation.engines=dedicated",),
        "dedicated needs a pool with purpose evaluation; set purpose",
    ),
    Case(
        "an evaluation pool without dedicated evaluation",
        ("spec.rollouts=[{name: a}, {name: b, purpose: evaluation}]",),
        "evaluation.engines is not dedicated; set evaluation.engines: dedicated, or purpose: training",
    ),
    *(
        Case(
            f"ratio proximal with the missing correction of {preset}",
            (f"spec.algorithm={{preset: {preset}, ratio: proximal}}",),
            f"algorithm.correction: preset {preset} sets none for its ratio behavior, and with ratio proximal nothing "
            "corrects stale samples; set tis, or none",
            "sets none for its ratio behavior, and with ratio proximal nothing corrects stale samples; set tis, or",
            "CEL messages contain no values",
        )
        for preset in ("cispo", "topr")
    ),
    *(
        Case(
            f"{field} without an effect in {{{fields}}}",
            (f"spec.algorithm={{{fields}, {field}: {value}}}",),
            f"algorithm.{field}: {cause}, so it has no effect; remove it, or set rewardClip or another advantage",
            "",
            MANY,
        )
        for fields, field, value, cause in (
            (
                "preset: lite_ppo",
                "rewardMean",
                "batch",
                "lite_ppo subtracts a baseline of the group from rewards, and divides by a deviation of the batch",
            ),
            ("preset: lite_ppo", "rewardStd", "running", "lite_ppo divides by the deviation of the batch"),
            (
                "preset: reinforce_pp",
                "rewardMean",
                "running",
                "reinforce_pp subtracts the mean of the batch",
            ),
            ("preset: reinforce_pp", "rewardStd", "batch", "reinforce_pp divides by the deviation of the batch"),
            (
                "preset: reinforce_pp_baseline",
                "rewardStd",
                "batch",
                "reinforce_pp_baseline divides by the deviation of the batch",
            ),
            (
                "advantage: reward, whitenAdvantages: true",
                "rewardMean",
                "batch",
                "whitenAdvantages subtracts the mean of the batch",
            ),
            (
                "preset: dr_grpo, whitenAdvantages: true",
                "rewardStd",
                "batch",
                "whitenAdvantages divides by the deviation of the batch",
            ),
        )
    ),
    *(
        Case(
            f"{preset} whitened twice",
            (f"spec.algorithm={{preset: {preset}, whitenAdvantages: true}}",),
            f"algorithm.whitenAdvantages: {preset} is whitened already, so it has no effect; remove it",
            "is whitened already, so it has no effect; remove it",
            "CEL messages contain no values",
        )
        for preset in ("reinforce_pp", "reinforce_pp_baseline")
    ),
    Case(
        "distillation without constant groups",
        (_TWO_MODELS, "spec.algorithm={preset: distillation, teachers: [{model: big}], groupFilter: nonconstant}"),
        "algorithm.groupFilter: with advantage zero rewards are not used, and groups would be replaced by them; set",
        "",
        MANY,
    ),
    Case(
        "distillation without constant groups of a task",
        (
            _TWO_MODELS,
            "spec.algorithm={preset: distillation, teachers: [{model: big}]}",
            "spec.tasks[0].groupFilter.kind=nonconstant",
        ),
        "tasks[0].groupFilter.kind: with advantage zero rewards are not used, and groups would be replaced",
        "",
        MANY,
    ),
    Case(
        "a task that a teacher has twice",
        (_TWO_MODELS, "spec.algorithm.teachers=[{model: big, tasks: [sums, sums]}]"),
        "algorithm.teachers[0].tasks[1]: 'sums' is named twice; name it once",
        "Duplicate value",
        LISTED,
    ),
    Case(
        "one sample per prompt with a teacher of another task",
        (
            _TWO_MODELS,
            _TWO_TASKS,
            "spec.training.samplesPerPrompt=1",
            "spec.algorithm={preset: dr_grpo, teachers: [{model: big, tasks: [more]}]}",
        ),
        "so nothing is learned from task sums, which no teacher teaches; set at least 2, or another",
        "",
        MANY,
    ),
    Case(
        "ratio behavior with the correction of a preset",
        ("spec.algorithm.ratio=behavior",),
        "algorithm.correction: tis with ratio behavior weights the mismatch between engine and trainer twice",
        "with ratio behavior the mismatch between engine and trainer is weighted twice",
        "CEL messages contain no values",
    ),
    Case(
        "a correction with a preset whose ratio is behavior",
        ("spec.algorithm={preset: topr, correction: icepop}",),
        "algorithm.correction: icepop with ratio behavior weights",
        "with ratio behavior the mismatch between engine and trainer is weighted twice",
        "CEL messages contain no values",
    ),
    Case(
        "a penalty of KL-Cov on ratios that are 1",
        ("spec.algorithm.objective=kl_cov",),
        "algorithm.minibatches: with one update per batch and ratio proximal the ratio is 1",
        "",
        MANY,
    ),
    Case(
        "bounds of the covariance in the wrong order",
        ("spec.algorithm={objective: clip_cov, covarianceLow: 6}",),
        "algorithm.covarianceLow: 6 is not below covarianceHigh, 5; lower it",
        "",
        MANY,
    ),
    Case(
        "a dual clip below 1",
        ("spec.algorithm.dualClip=0.5",),
        "dualClip: must be more than 1, or 0 for no bound",
        "must be more than 1, or 0 for no bound",
        "CEL messages contain no values",
    ),
    Case(
        "a field that the objective does not read",
        ("spec.algorithm={preset: topr, clipLow: 0.1}",),
        "algorithm.clipLow: the objective topr does not read it; remove it, or set objective to ppo_clip or gspo",
        "",
        MANY,
    ),
    Case(
        "a penalty without a buffer",
        ("spec.algorithm.overlongPenalty=1",),
        "algorithm.overlongPenalty: has no effect without overlongBuffer",
        "",
        MANY,
    ),
    Case(
        "a reference that is not defined",
        ("spec.algorithm={klCoefficient: 0.1, referenceModel: big}",),
        "algorithm.referenceModel: 'big' is not defined; there are policy; name one of them, or add it to models",
        "is not defined; name one of models",
        "CEL messages contain no values",
    ),
    Case(
        "a teacher that is not defined",
        ("spec.algorithm.teachers=[{model: big}]",),
        "algorithm.teachers[0].model: 'big' is not defined; there are policy",
        "the model of a teacher is not defined; name one of models",
        "CEL messages contain no values",
    ),
    Case(
        "a critic that is not defined",
        ("spec.algorithm={preset: ppo, criticModel: big}",),
        "algorithm.criticModel: 'big' is not defined; there are policy",
        "is not defined; name one of models",
        "CEL messages contain no values",
    ),
    Case(
        "a model for a critic that no advantage reads",
        ("spec.algorithm.criticModel=policy",),
        "algorithm.criticModel: the advantage group_normalized does not read it; remove it, or set advantage to gae",
        "",
        MANY,
    ),
    *(
        Case(
            f"{field} without a critic",
            (f"spec.algorithm.{field}=1",),
            f"algorithm.{field}: has no effect without a critic; set advantage to gae, or remove {field}",
            "",
            MANY,
        )
        for field in ("valueClip", "valueLambda", "criticWarmupSteps")
    ),
    Case(
        "an optimizer without a critic",
        ("spec.trainer.criticOptimizer={learningRate: 0.1}",),
        "trainer.criticOptimizer: the algorithm has no critic; remove it, or set algorithm.advantage to gae",
        "",
        MANY,
    ),
    Case(
        "a schedule of the critic without a length",
        ("spec.algorithm.preset=ppo", "spec.trainer.criticOptimizer.schedule=linear"),
        "trainer.criticOptimizer.scheduleSteps: schedule linear needs it; set it, usually to training.steps",
        "",
        MANY,
    ),
    Case(
        "a warm-up of the critic as long as training",
        ("spec.algorithm={preset: ppo, criticWarmupSteps: 100}", "spec.training.steps=100"),
        "algorithm.criticWarmupSteps: 100 is not below training.steps, 100, so the policy would not be trained; lower",
        "",
        MANY,
    ),
    Case(
        "two kinds of λ",
        ("spec.algorithm={preset: ppo, gaeLambda: 0.9, gaeLengthFactor: 0.05}",),
        "algorithm.gaeLambda: gaeLengthFactor replaces it; remove one of them",
        "",
        MANY,
    ),
    Case(
        "λ without generalized advantages",
        ("spec.algorithm.gaeLambda=0.9",),
        "algorithm.gaeLambda: the advantage group_normalized does not read it; remove it, or set advantage to gae",
        "",
        MANY,
    ),
    Case(
        "a model that nothing uses",
        (_TWO_MODELS,),
        "models[1]: no field uses the model big; name it in algorithm.referenceModel, algorithm.teachers[].model,",
        "",
        MANY,
    ),
    Case(
        "a frozen pool of a model that is not defined",
        ("spec.rollouts=[{name: a}, {name: b, model: big}]",),
        "rollouts[1].model: 'big' is not defined; there are policy; name one of them, or add it to models",
        "",
        MANY,
    ),
    Case(
        "a judge of a pool that is not frozen",
        ("spec.rewards=[{name: exact, builtin: judge, config: {pool: main}}]",),
        "rewards[0].config.pool: 'main' is no pool with a model of its own; there is none; name an entry of rollouts",
        "",
        UNTYPED,
    ),
    Case(
        "a reference without a coefficient",
        (_TWO_MODELS, "spec.algorithm.referenceModel=big"),
        "algorithm.referenceModel: has no effect without klCoefficient; set it, or remove referenceModel",
        "",
        MANY,
    ),
    Case(
        "an estimator without a coefficient",
        ("spec.algorithm.klEstimator=k2",),
        "algorithm.klEstimator: has no effect without klCoefficient",
        "",
        MANY,
    ),
    Case(
        "KL in the loss without a gradient",
        ("spec.algorithm={klCoefficient: 0.1, klEstimator: k1}",),
        "algorithm.klEstimator: the expected gradient of k1 in the loss is 0, so it has no effect; set k2, k3 or",
        "",
        MANY,
    ),
    Case(
        "an estimator of the loss in the reward",
        ("spec.algorithm={klCoefficient: 0.1, klIn: reward, klEstimator: k3_unbiased}",),
        "algorithm.klEstimator: in the reward, without a gradient, k3_unbiased is k3; set k1, or klIn: loss",
        "",
        MANY,
    ),
    Case(
        "distillation without a teacher",
        ("spec.algorithm.preset=distillation",),
        "algorithm.teachers: with advantage zero nothing is learned from task sums without a teacher; add one",
        "",
        MANY,
    ),
    Case(
        "distillation with KL in rewards that are not used",
        (
            *WITH_TEACHER,
            "spec.algorithm={preset: distillation, teachers: [{model: big}], klCoefficient: 1, klIn: reward}",
        ),
        "algorithm.klIn: with advantage zero rewards are not used; set loss, or another advantage",
        "",
        MANY,
    ),
    Case(
        "the policy as its own teacher",
        ("spec.algorithm.teachers=[{model: policy}]",),
        "algorithm.teachers[0].model: policy cannot teach itself; name another model, or set klCoefficient",
        "",
        MANY,
    ),
    Case(
        "a teacher with an objective that follows rewards",
        (*WITH_TEACHER, "spec.algorithm.preset=raft_pp"),
        "algorithm.objective: raft_pp distinguishes samples by rewards, which a teacher does not change",
        "",
        MANY,
    ),
    Case(
        "a floor above the cap",
        ("spec.algorithm={correction: icepop, correctionFloor: 0.9, correctionCap: 0.8}",),
        "algorithm.correctionFloor: 0.9 is not below correctionCap, 0.8; lower it",
        "",
        MANY,
    ),
    Case(
        "difficulties that exclude every group",
        ("spec.algorithm={difficultyAbove: 0.5, difficultyBelow: 0.5}",),
        "algorithm.difficultyAbove: 0.5 is not below difficultyBelow, 0.5; lower it",
        "",
        MANY,
    ),
    Case(
        "a buffer as long as an answer",
        ("spec.algorithm.overlongBuffer=8", "spec.tasks[0].sampling.maxTokens=8"),
        "algorithm.overlongBuffer: 8 is not below sampling.maxTokens of task",
        "",
        MANY,
    ),
    Case(
        "a constant schedule with a length",
        ("spec.trainer.optimizer.scheduleSteps=9",),
        "schedule constant does not read it; remove it, or set another schedule",
    ),
    Case(
        "a constant schedule with another rate at its end",
        ("spec.trainer.optimizer.finalRatio=0.1",),
        "schedule constant does not read it; remove it, or set another schedule",
    ),
    Case(
        "a schedule without a length",
        ("spec.trainer.optimizer.schedule=linear",),
        "needs it; set it, usually to training.steps",
    ),
    Case(
        "a schedule that ends in the warm-up",
        ("spec.trainer.optimizer={schedule: linear, scheduleSteps: 9, warmupSteps: 9}",),
        "is not more than warmupSteps",
    ),
    Case(
        "a decay longer than its schedule",
        ("spec.trainer.optimizer={schedule: wsd, scheduleSteps: 9, warmupSteps: 1, decaySteps: 9}",),
        "is more than scheduleSteps − warmupSteps; lower it",
    ),
    Case(
        "a schedule without its decay",
        ("spec.trainer.optimizer={schedule: wsd, scheduleSteps: 9}",),
        "schedule wsd needs it",
    ),
    Case(
        "a decay without its schedule",
        ("spec.trainer.optimizer={schedule: cosine, scheduleSteps: 9, decaySteps: 3}",),
        "only schedule wsd reads it; remove it, or set schedule: wsd",
    ),
    Case(
        "one sample per prompt with DAPO",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm={preset: dapo, advantage: reward}"),
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
    ),
    Case(
        "one sample per prompt with RLOO",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm.preset=rloo"),
        "training.samplesPerPrompt: 1 makes every advantage of algorithm.advantage rloo 0",
        "1 makes every advantage 0 with this algorithm",
        "CEL messages contain no values",
    ),
    Case(
        "bounds of difficulty with centered rewards",
        ("spec.algorithm={rewardMean: group, difficultyAbove: 0.1}",),
        "it reads the mean reward of a group, which rewardMean changes; remove one of them",
    ),
    Case(
        "weights by difficulty with scaled rewards",
        ("spec.algorithm={rewardStd: batch, difficultyExponent: 1}",),
        "it reads the mean reward of a group, which rewardStd changes; remove one of them",
    ),
    Case(
        "one centered reward per prompt",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm={preset: reinforce_pp, rewardMean: group}"),
        "1 makes every reward 0 with algorithm.rewardMean group, so nothing is learned",
        "",
        MANY,
    ),
    Case(
        "centered rewards that the advantage centers",
        ("spec.algorithm={preset: dr_grpo, rewardMean: batch}",),
        "algorithm.rewardMean: group_centered subtracts a baseline of the group from rewards, so it has no effect",
        "",
        MANY,
    ),
    Case(
        "scaled rewards that the advantage scales",
        ("spec.algorithm.rewardStd=running",),
        "algorithm.rewardStd: group_normalized divides by the deviation of the group, so it has no effect; remove it",
        "",
        MANY,
    ),
    Case(
        "distillation with rewards that are not used",
        (_TWO_MODELS, "spec.algorithm={preset: distillation, teachers: [{model: big}], rewardClip: 1}"),
        "algorithm.rewardClip: with advantage zero rewards are not used; remove rewardClip",
        "",
        MANY,
    ),
    Case(
        "a target of KL without a coefficient",
        ("spec.algorithm.klTarget=0.1",),
        "algorithm.klTarget: has no effect without klCoefficient; set it, or remove klTarget",
        "",
        MANY,
    ),
    Case(
        "a teacher in the trainer and in a pool",
        (*_POOL, "spec.algorithm.teachers=[{model: big, pool: b}]"),
        "set either model or pool of a teacher",
    ),
    Case(
        "a teacher without a model",
        (*_POOL, "spec.algorithm.teachers=[{pool: b}, {weight: 0.5}]"),
        "set either model or pool of a teacher",
    ),
    Case(
        "a teacher of a task that is not defined",
        (*_POOL, "spec.algorithm.teachers=[{pool: b, tasks: [sums, more]}]"),
        "algorithm.teachers[0].tasks[1]: 'more' is not defined; there are sums; name one of tasks",
        "",
        MANY,
    ),
    Case(
        "a teacher twice",
        (*_POOL, "spec.algorithm.teachers=[{pool: b, tasks: [sums]}, {pool: b}]"),
        "algorithm.teachers[1]: teachers[0] is the same model and teaches the same task; remove one of them",
        "",
        MANY,
    ),
    Case(
        "a task that no teacher teaches, without rewards",
        (*_POOL, "spec.algorithm={preset: distillation, teachers: [{pool: b, tasks: [sums]}]}", _TWO_TASKS),
        "algorithm.teachers: with advantage zero nothing is learned from task more without a teacher",
        "",
        MANY,
    ),
    Case(
        "a reference in the trainer and in a pool",
        (*_POOL, "spec.algorithm={klCoefficient: 0.1, referenceModel: big, referencePool: b}"),
        "referenceModel names another reference; remove one of them",
    ),
    Case(
        "a teacher in a pool at another temperature",
        (*_POOL, "spec.algorithm.teachers=[{pool: b}]", "spec.tasks[0].sampling={temperature: 0.5}"),
        "compute log-probabilities at temperature 1",
        "compute log-probabilities at temperature 1",
        "CEL messages contain no values",
    ),
    Case(
        "a teacher in a pool of the policy",
        ("spec.algorithm.teachers=[{pool: main}]",),
        "algorithm.teachers[0].pool: 'main' is no pool with a model of its own; there is none; name an entry of",
        "",
        MANY,
    ),
    Case(
        "a teacher in a pool of short sequences",
        (*_POOL, "spec.algorithm.teachers=[{pool: b}]", "spec.rollouts[1].maxModelLength=64"),
        "algorithm.teachers[0].pool: maxModelLength of pool b, 64, is not above that of the policy",
        "",
        MANY,
    ),
    Case(
        "a teacher in a pool of sequences as long as those of the policy",
        (*_POOL, "spec.algorithm.teachers=[{pool: b}]", "spec.rollouts[1].maxModelLength=4096"),
        "algorithm.teachers[0].pool: maxModelLength of pool b, 4096, is not above that of the policy, 4096",
        "",
        MANY,
    ),
    Case(
        "a reference in a pool without a coefficient",
        (*_POOL, "spec.algorithm={referencePool: b}"),
        "algorithm.referencePool: has no effect without klCoefficient; set it, or remove referencePool",
        "",
        MANY,
    ),
    Case(
        "gigpo without an environment",
        ("spec.algorithm.preset=gigpo",),
        "compares steps from the same state of an environment",
    ),
    Case(
        "more minibatches than samples",
        ("spec.algorithm.minibatches=9", "spec.training.promptsPerStep=1"),
        "samples of a batch; lower it",
    ),
    Case(
        "copies of the model with different numbers of processes",
        ("spec.trainer.parallelism.replicate=2", "spec.trainer.processesPerNode=3"),
        "every copy of the model needs the same number of processes",
    ),
    *(
        Case(f"{name} parallelism of FSDP2", (*_TWO_PROCESSES, f"spec.trainer.parallelism.{name}=2"), _NEEDS_MEGATRON)
        for name in ("tensor", "pipeline", "virtualPipeline", "context", "expert")
    ),
    Case(
        "replicas of different numbers of processes",
        ("spec.trainer={backend: megatron, processesPerNode: 6, parallelism: {tensor: 2, pipeline: 2}}",),
        "every replica of the model needs tensor × pipeline × context processes; set divisors",
    ),
    Case(
        "parts of samples on different numbers of processes",
        ("spec.trainer={backend: megatron, processesPerNode: 4, parallelism: {context: 3}}",),
        "every replica of the model needs tensor × pipeline × context processes; set divisors",
    ),
    Case(
        "experts on different numbers of processes",
        ("spec.trainer={backend: megatron, processesPerNode: 8, parallelism: {tensor: 2, expert: 8}}",),
        "does not divide the processes with the same part of the layers",
    ),
    Case(
        "groups of layers without stages",
        ("spec.trainer={backend: megatron, parallelism: {virtualPipeline: 2}}",),
        "groups of layers need several pipeline stages; set pipeline above 1",
    ),
    Case(
        "parts of packed samples",
        ("spec.trainer={backend: megatron, processesPerNode: 2, packing: varlen, parallelism: {context: 2}}",),
        "parts of packed samples are not computed; set packing: none, or context: 1",
    ),
    Case(
        "copies of a model of Megatron-Core",
        ("spec.trainer={backend: megatron, processesPerNode: 2, parallelism: {replicate: 2}}",),
        _NOT_MEGATRON,
    ),
    Case("adapters of Megatron-Core", ("spec.trainer={backend: megatron, lora: {rank: 4}}",), _NOT_MEGATRON),
    Case("offload by Megatron-Core", ("spec.trainer={backend: megatron, optimizer: {offload: true}}",), _NOT_MEGATRON),
    Case(
        "decayed matrices of Megatron-Core",
        ("spec.trainer={backend: megatron, optimizer: {decayed: matrices}}",),
        _NOT_MEGATRON,
    ),
    Case(
        "a critic's offload by Megatron-Core",
        ("spec.algorithm.preset=ppo", "spec.trainer={backend: megatron, criticOptimizer: {offload: true}}"),
        _NOT_MEGATRON,
    ),
    Case(
        "a critic's decayed matrices of Megatron-Core",
        ("spec.algorithm.preset=ppo", "spec.trainer={backend: megatron, criticOptimizer: {decayed: matrices}}"),
        _NOT_MEGATRON,
    ),
    Case(
        "nonconstant groups of one sample",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm.groupFilter=nonconstant"),
        "with training.samplesPerPrompt 1 every group is constant and would be rejected; use none, or more samples",
    ),
    Case(
        "one sample per prompt with Dr. GRPO",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm.preset=dr_grpo"),
        "training.samplesPerPrompt: 1 makes every advantage of algorithm.advantage group_centered 0",
        "1 makes every advantage 0 with this algorithm",
        "CEL messages contain no values",
    ),
    Case(
        "one sample per prompt with a centered advantage",
        ("spec.training.samplesPerPrompt=1", "spec.algorithm.advantage=group_centered"),
        "so nothing is learned; set at least 2, or another algorithm.advantage",
    ),
    Case(
        "two sources of data",
        ("spec.tasks[0].data.jsonl={path: 'job://a'}",),
        "give exactly one of reasoningGym, jsonl, parquet, datasets",
    ),
    Case(
        "no source of data",
        ("spec.tasks[0].data={}",),
        "give exactly one of reasoningGym, jsonl, parquet, datasets",
    ),
    Case(
        "columns of generated problems",
        ("spec.tasks[0].data.columns={question: prompt}",),
        "problems of reasoningGym always have question, answer and metadata; remove it",
    ),
    Case(
        "two held-out settings for rows",
        (_EXACT, _jsonl("heldOutPath: 'job://b'", "heldOutFraction: 0.1")),
        "heldOutPath is given too; give one of them",
    ),
    Case(
        "two held-out settings for splits",
        (_EXACT, "spec.tasks[0].data={datasets: {path: 'job://a', heldOutSplit: x, heldOutFraction: 0.1}}"),
        "heldOutSplit is given too; give one of them",
    ),
    Case(
        "the seed of reasoning-gym",
        ("spec.tasks[0].data.reasoningGym.config.seed=1",),
        "governed by the job; remove it and set spec.seed",
        "",
        UNTYPED,
    ),
    Case(
        "the size of reasoning-gym",
        ("spec.tasks[0].data.reasoningGym.config.size=1",),
        "governed by the job",
        "",
        UNTYPED,
    ),
    Case(
        "two forms of a prompt",
        ("spec.tasks[0].prompt='{question}'", "spec.tasks[0].messagesColumn=chat"),
        "a task has one of prompt, messages, messagesColumn",
    ),
    Case("a prompt without a column", ("spec.tasks[0].prompt=hello",), "the template names no column; put {question}"),
    Case("an open brace", ("spec.tasks[0].prompt='{question'",), "write {{ and }} for literal braces"),
    Case("a single brace", ("spec.tasks[0].prompt='a} {b}'",), "write {{ and }} for literal braces"),
    Case("an attribute of a column", ("spec.tasks[0].prompt='{a.b}'",), "write {{ and }} for literal braces"),
    Case("a conversion of a column", ("spec.tasks[0].prompt='{a!r}'",), "write {{ and }} for literal braces"),
    Case(
        "a chat with an invalid template",
        ("spec.tasks[0].messages=[{role: user, content: '{'}]",),
        "write {{ and }} for literal braces",
        "",
        BUDGET,
    ),
    Case(
        "a chat without a column",
        ("spec.tasks[0].messages=[{role: user, content: hello}]",),
        "the template names no column",
        "",
        BUDGET,
    ),
    Case(
        "a chat that ends with the assistant",
        ("spec.tasks[0].messages=[{role: user, content: '{a}'}, {role: assistant, content: b}]",),
        "the last message is the assistant's; end with the message that the model answers",
    ),
    Case(
        "a model at a remote URL", ("spec.models[0].source='gs://b/x'",), "cannot be read; write job://PATH for a path"
    ),
    Case("a model of the Hub without an owner", ("spec.models[0].source='hf://x'",), "write hf://ORG/NAME@REVISION"),
    Case("a bucket without a prefix", ("spec.models[0].source='s3://bucket/'",), "write s3://BUCKET/PREFIX"),
    Case("rows at a remote URL", (_EXACT, "spec.tasks[0].data={jsonl: {path: 'hf://a/b'}}"), "cannot be read; write"),
    Case(
        "a claim and an emptyDir for models",
        ("spec.downloads={claim: mine, emptyDir: true}",),
        "downloads have one of claim, emptyDir",
    ),
    Case("a path outside the storage", ("spec.models[0].source='job://../x'",), "is not a path inside the storage"),
    Case(
        "a path outside the storage after a directory",
        ("spec.models[0].source='job://a/..'",),
        "is not a path inside the storage",
    ),
    Case("an absolute path", ("spec.models[0].source='job:///x'",), "is not a path inside the storage"),
    Case("the root of the storage", ("spec.models[0].source='job://./.'",), "is not a path inside the storage"),
    Case(
        "an initializer path outside the storage",
        ("spec.initializer.command=[a, 'job://../x']",),
        "is not a path inside the storage",
    ),
    Case(
        "rows outside the storage",
        (_EXACT, "spec.tasks[0].data={jsonl: {path: 'job://..'}}"),
        "is not a path inside the storage",
    ),
    Case(
        "splits outside the storage",
        (_EXACT, "spec.tasks[0].data={datasets: {path: 'job:///a'}}"),
        "is not a path inside the storage",
    ),
    Case(
        "a model at a local path",
        ("spec.models[0].source=./model",),
        "",
        "is for rljob run; in a cluster put it into the job's storage and write job://PATH",
        ONLY_IN_A_CLUSTER,
    ),
    Case(
        "rows at a local path",
        (_EXACT, "spec.tasks[0].data={parquet: {path: rows.parquet}}"),
        "",
        "is for rljob run; in a cluster put it into the job's storage and write job://PATH",
        ONLY_IN_A_CLUSTER,
    ),
    Case(
        "a reward without a scorer",
        ("spec.rewards=[{name: exact}]",),
        "give exactly one of builtin, function, url, local",
    ),
    Case(
        "a reward with two scorers",
        ("spec.rewards[0].url=http://a",),
        "give exactly one of builtin, function, url, local",
    ),
    Case(
        "a pod for a reward service outside the job",
        (f"spec.rewards=[{{name: exact, url: 'http://a', template: {_TEMPLATE}}}]",),
        "a service with url has no pod in the job; remove one of them",
    ),
    Case(
        "a reward of your own without a pod",
        ("spec.rewards=[{name: exact, local: {command: [serve]}}]",),
        "",
        "is for rljob run; in a cluster give the service's container in template, or its url",
        ONLY_IN_A_CLUSTER,
    ),
    Case(
        "a reward of your own without an image",
        ("spec.rewards=[{name: exact, template: {spec: {containers: [{name: main}]}}}]",),
        "",
        "",
        BUDGET,
    ),
    Case(
        "an unknown option of a builtin",
        (_EXACT, _jsonl(), "spec.rewards[0].config.colum=answer"),
        "spec.rewards[0].config.colum: unknown field; did you mean column?",
        "",
        UNTYPED,
    ),
    Case(
        "an invalid regular expression",
        (_EXACT, _jsonl(), "spec.rewards[0].config.extract='('"),
        "is not a regular expression",
        "",
        UNTYPED,
    ),
    Case(
        "options of a service outside the job",
        ("spec.rewards=[{name: exact, url: 'http://a', config: {column: x}}]",),
        "applies to a builtin or a function only; remove it",
        "",
        UNTYPED,
    ),
    Case(
        "an argument that rljob sets",
        ("spec.rollouts[0].args=['--port=1']",),
        "is governed by rljob",
        "",
        BUDGET,
    ),
    Case(
        "an engine of SGLang on two hosts",
        ("spec.rollouts[0].engine=sglang", "spec.rollouts[0].hosts=2", "spec.rollouts[0].parallelism.tensor=2"),
        "only engines of vllm span hosts; set hosts: 1, or another engine",
    ),
    Case(
        "an engine of one's own on two hosts",
        ("spec.rollouts[0].engine='a:B'", "spec.rollouts[0].hosts=2", "spec.rollouts[0].parallelism.tensor=2"),
        "only engines of vllm span hosts",
    ),
    Case(
        "an engine on two hosts without GPUs",
        (
            "spec.rollouts[0].accelerator.kind=cpu",
            "spec.rollouts[0].hosts=2",
            "spec.rollouts[0].parallelism.tensor=2",
        ),
        "vLLM on a CPU does not support Ray",
    ),
    Case(
        "replicas of the model in an engine on two hosts",
        ("spec.rollouts[0].parallelism.data=2", "spec.rollouts[0].hosts=2"),
        "an engine that spans hosts has one replica of the model",
    ),
    Case(
        "hosts with different numbers of workers",
        ("spec.rollouts[0].parallelism.tensor=8", "spec.rollouts[0].hosts=3"),
        "does not divide the workers of an engine",
    ),
    Case("storage with size and claim", ("spec.storage={size: 1Gi, claim: a}",), "a storage has one of size, claim"),
    Case(
        "storage with class and claim",
        ("spec.storage={className: fast, claim: a}",),
        "a storage has one of className, claim",
    ),
    Case(
        "storage with access modes and claim",
        ("spec.storage={accessModes: [ReadWriteMany], claim: a}",),
        "a storage has one of accessModes, claim",
    ),
    Case(
        "max engines below min",
        ("spec.rollouts[0].replicas={min: 3, max: 2}",),
        "is less than min",
    ),
    Case(
        "no pods of a service at most",
        ("spec.rewards[0].replicas.min=0",),
        "required with min 0; set the most pods that the service may have",
    ),
    Case(
        "no pods of an environment at most",
        (*_ACTING, "spec.environments[0].replicas.min=0"),
        "required with min 0; set the most pods that the service may have",
    ),
    Case("no runner", ("spec.runner.replicas={min: 0, max: 2}",), "must be at least 1", "to 1", SCHEMA),
    *(
        Case(
            f"{what} without Prometheus for KEDA",
            (*needs, f"spec.{field}.autoscaling.provider=keda"),
            "required by provider keda; give the address of Prometheus in keda.serverAddress",
        )
        for what, field, needs in _SCALED
    ),
    *(
        Case(
            f"{what} with settings of KEDA for nothing",
            (*needs, f"spec.{field}.autoscaling.keda.serverAddress=http://p"),
            "only provider keda reads it; remove it, or set provider: keda",
        )
        for what, field, needs in _SCALED
    ),
    Case(
        "KEDA without a query for a frozen pool",
        (
            'spec.models=[{"name": "policy", "source": "job://model"}, {"name": "judge", "source": "job://judge"}]',
            "spec.rollouts=[{name: main}, {name: j, model: judge, "
            "autoscaling: {provider: keda, keda: {serverAddress: 'http://p'}}}]",
        ),
        "required, rljob knows no load of a frozen pool; give a query",
    ),
    *(
        Case(
            f"a queue of {provider}",
            (f"spec.scheduling.gang={{provider: {provider}, queue: mine}}",),
            "this provider has no queues; remove it, or set provider volcano or kueue",
        )
        for provider in ("none", "kubernetes", "coscheduling")
    ),
    Case(
        "kueue without a queue",
        ("spec.scheduling.gang.provider=kueue",),
        "required by provider kueue; give the name of a LocalQueue",
    ),
    *(
        Case(
            f"{what} that may grow beyond the quota of kueue",
            (
                *needs,
                "spec.scheduling.gang={provider: kueue, queue: mine}",
                f"spec.{field}.replicas={{min: 1, max: 2}}",
            ),
            "kueue admits a fixed number of pods; remove replicas.max of every role, or set it to min",
        )
        for what, field, needs in _SCALED
    ),
    Case("max runners below min", ("spec.runner.replicas={min: 3, max: 2}",), "is less than min"),
    Case("max reward pods below min", ("spec.rewards[0].replicas={min: 2, max: 1}",), "is less than min"),
    Case(
        "destinations without policy Listed",
        ("spec.network.egress.to=[{name: a, cidr: 10.0.0.0/8}]",),
        "policy Any allows all destinations; set policy: Listed, or remove it",
    ),
    Case(
        "destinations of a reward without policy Listed",
        ("spec.rewards[0].egress.to=[{name: a, cidr: 10.0.0.0/8}]",),
        "policy Any allows all destinations; set policy: Listed, or remove it",
    ),
    Case(
        "destinations of a reward outside the job",
        ("spec.rewards=[{name: exact, url: 'http://a', egress: {policy: Listed}}]",),
        "a service with url has no pod in the job; remove one of them",
    ),
    Case(
        "destinations of an environment outside the job",
        ("spec.environments=[{name: lake, url: 'http://a', egress: {policy: Listed}}]",),
        "a service with url has no pod in the job; remove one of them",
    ),
    Case(
        "GPUs as RDMA adapters",
        ("spec.trainer.rdma.resource=nvidia.com/gpu",),
        "nvidia.com/gpu is requested by accelerator; name the resource of the network adapters",
    ),
    Case(
        "a profile of a trainer on CPU",
        ("spec.trainer.accelerator={kind: cpu, profile: h100}",),
        "a role on the CPU has no accelerator; remove it, or set kind: auto",
    ),
    Case(
        "a profile of an engine on CPU",
        ("spec.rollouts[0].accelerator={kind: cpu, profile: h100}",),
        "a role on the CPU has no accelerator; remove it, or set kind: auto",
    ),
    Case(
        "GPUs as RDMA adapters of an engine",
        ("spec.rollouts[0].rdma.resource=nvidia.com/gpu",),
        "nvidia.com/gpu is requested by accelerator; name the resource of the network adapters",
    ),
    Case(
        "a variable of another library",
        ("spec.trainer.nccl={PATH: /bin}",),
        "spec.trainer.nccl.PATH: must begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_, not 'PATH'; set others in",
        "a name does not begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_; set other variables in template",
        "CEL messages contain no values",
    ),
    Case(
        "an engine's variable of another library",
        ("spec.rollouts[0].nccl={PATH: /bin}",),
        "must begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_, not 'PATH'; set others in template",
        "a name does not begin with NCCL_, TORCH_NCCL_, GLOO_, UCX_ or FI_; set other variables in template",
        "CEL messages contain no values",
    ),
    Case(
        "a trainer with hostNetwork that policies would block",
        ("spec.trainer.hostNetwork=true",),
        "give the addresses of nodes in network.nodes, or set network.policy: Disabled",
    ),
    Case(
        "engines with hostNetwork that policies would block",
        ("spec.rollouts[0].hostNetwork=true",),
        "give the addresses of nodes in network.nodes, or set network.policy: Disabled",
    ),
    Case(
        "the restart policy of a pod",
        ("spec.trainer.template={spec: {restartPolicy: Always}}",),
        "governed by rljob, which restarts processes itself; remove it",
    ),
    Case(
        "rljob's own variables",
        ("spec.trainer.template={spec: {containers: [{name: main, env: [{name: RLJOB_X, value: a}]}]}}",),
        "variables that begin with RLJOB_ are reserved for rljob; remove it",
        "",
        BUDGET,
    ),
    Case(
        "rljob's own labels",
        ("spec.trainer.template={metadata: {labels: {rljob.dev/job: x}}}",),
        "labels that begin with rljob.dev/ are reserved for rljob; remove it",
        "",
        BUDGET,
    ),
    Case(
        "rljob's own port",
        ("spec.runner.template={spec: {containers: [{name: side, ports: [{containerPort: 8080}]}]}}",),
        "port 8080 is reserved for rljob",
        "",
        BUDGET,
    ),
    Case(
        "another command of the initializer",
        ("spec.initializer.template={spec: {containers: [{name: main, args: [x]}]}}",),
        "initializer.template.spec.containers[0].args: governed by initializer.command",
        "",
        BUDGET,
    ),
    Case(
        "a container without a name",
        ("spec.trainer.template={spec: {containers: [{image: a}]}}",),
        "required; add it (the name of rljob's container is main)",
        "Required value",
        SCHEMA,
    ),
    Case(
        "a variable without a name",
        ("spec.trainer.template={spec: {containers: [{name: main, env: [{value: a}]}]}}",),
        "spec.containers[0].env[0].name: required",
        "Required value",
        SCHEMA,
    ),
    Case(
        "two variables of one name",
        ("spec.trainer.template={spec: {containers: [{name: main, env: [{name: A}, {name: A}]}]}}",),
        "is used twice; give every entry its own name",
        "Duplicate value",
        LISTED,
    ),
    Case(
        "two volumes at one mount path",
        ("spec.runner.template={spec: {containers: [{name: a, volumeMounts: [{mountPath: /a}, {mountPath: /a}]}]}}",),
        "is used twice; give every entry its own mountPath",
        "Duplicate value",
        LISTED,
    ),
    Case(
        "a CPU limit as a fraction",
        ("spec.trainer.template={spec: {containers: [{name: main, resources: {limits: {cpu: 0.5}}}]}}",),
        "must be a whole number, or text; put it in quotes",
        "resources.limits.cpu",
        SCHEMA,
    ),
    Case(
        "null in a list of a pod",
        ("spec.runner.template={spec: {containers: [null]}}",),
        "null deletes nothing in a list; remove it",
        "must be of type object",
        SCHEMA,
    ),
    Case(
        "the restart policy of a pod deleted",
        ("spec.trainer.template={spec: {restartPolicy: null}}",),
        "governed by rljob, which restarts processes itself; remove it",
        "",
        WRITTEN_NULL,
    ),
    Case(
        "an unknown field of a pod",
        ("spec.trainer.template={spec: {container: []}}",),
        "unknown field",
        'unknown field "spec.trainer.template.spec.container"',
    ),
    Case(
        "text for a number of a pod",
        ("spec.trainer.template={spec: {terminationGracePeriodSeconds: soon}}",),
        "must be a whole number",
        "must be of type integer",
        SCHEMA,
    ),
    *(
        Case(
            f"two {kind} of one name",
            (f"spec.{kind}=[{entry}, {entry}]",),
            "is used twice; give every entry its own name",
            "Duplicate value",
            LISTED,
        )
        for kind, entry in (
            ("models", "{name: policy, source: 'job://m'}"),
            ("tasks", "{name: a, data: {reasoningGym: {dataset: x}}, reward: exact}"),
            ("rewards", "{name: exact, builtin: reasoning_gym}"),
            ("rollouts", "{name: main}"),
            ("network.allowFrom", "{name: a}"),
            ("network.nodes", "{name: a, cidr: 10.0.0.0/8}"),
        )
    ),
]
"""Rules across fields, and rules of one field that a JSON schema cannot express."""

BOUNDS = [
    Case("an unknown field", ("spec.sed=1",), "unknown field", 'unknown field "spec.sed"'),
    Case("snake case", ("spec.training.max_staleness=1",), "unknown field", 'unknown field "spec.training.max_stale'),
    Case("text for a number", ("spec.seed='1'",), "must be a whole number", "must be of type integer", SCHEMA),
    Case("a fraction", ("spec.seed=1.5",), "must be a whole number", "must be of type integer", SCHEMA),
    Case(
        "a number below the minimum",
        ("spec.training.steps=-1",),
        "must be at least 0",
        "should be greater than or equal to 0",
        SCHEMA,
    ),
    Case(
        "a number above the maximum",
        ("spec.training.maxStaleness=65",),
        "must be at most 64",
        "less than or equal to 64",
        SCHEMA,
    ),
    Case(
        "a value on an exclusive bound",
        ("spec.algorithm.clipLow=0",),
        "must be more than 0",
        "should be greater than 0",
        SCHEMA,
    ),
    Case("an unknown preset", ("spec.algorithm.preset=a2c",), "must be 'grpo', 'dr_grpo'", "Unsupported value", SCHEMA),
    Case("an empty list", ("spec.tasks=[]",), "must have at least 1 entry", "should have at least 1 items", SCHEMA),
    Case("three betas", ("spec.trainer.optimizer.betas=[0, 0, 0]",), "must have at most 2", "at most 2 items", SCHEMA),
    Case("one beta", ("spec.trainer.optimizer.betas=[0]",), "required", "should have at least 2 items", SCHEMA),
    Case(
        "a beta of 1", ("spec.trainer.optimizer.betas=[0, 1]",), "must be less than 1", "should be less than 1", SCHEMA
    ),
    Case("a name in capitals", ("metadata.name=Sums",), "must consist of lower-case letters", "metadata.name", SCHEMA),
    Case("a name with a dot", ("metadata.name=a.b",), "must consist of lower-case letters", "metadata.name", SCHEMA),
    Case("a long name", (f"metadata.name={'a' * 64}",), "must have at most 63", "metadata.name", SCHEMA),
    Case("a name with a space", ("spec.tasks[0].reward='a b'",), "must consist of lower-case", "should match", SCHEMA),
    Case("an invalid URL", ("spec.rewards[0].url=a:80",), "must begin with http://", "should match", SCHEMA),
    Case(
        "a long text", (f"spec.managedBy={'a' * 4097}",), "must have at most 4096", "may not be more than 4096", SCHEMA
    ),
    Case("an empty text", ("spec.managedBy=''",), "is empty; give it a value", "should be at least 1 chars", SCHEMA),
    Case("an invalid resource", ("spec.trainer.rdma.resource=hca",), "such as rdma/hca", "should match", SCHEMA),
    Case("an invalid quantity", ("spec.storage.size=10 GB",), "must be an amount such as 10Gi", "should match", SCHEMA),
    Case(
        "many options",
        (f"spec.rewards[0].config={{{', '.join(f'a{i}: 1' for i in range(65))}}}",),
        "must have at most 64",
    ),
    Case(
        "a long key",
        (_EXACT, f"spec.tasks[0].data={{jsonl: {{path: 'job://a'}}, columns: {{? {'a' * 4097} : b}}}}"),
        "must have at most 4096",
        "",
        KEYS,
    ),
    Case("null for a default", ("spec.seed=null",), "must be a whole number, not null", "", WRITTEN_NULL),
    Case("null for a required field", ("spec.training=null",), "must be a mapping", "Required value", SCHEMA),
    Case("a missing required field", ("spec={}",), "required; add it", "Required value", SCHEMA),
]
"""Bounds of single fields: one case for each kind of bound."""

UNSUPPORTED = [
    Case(
        "a planned value", ("spec.rollouts[0].placement=Colocated",), "not supported yet", "", "checked by the operator"
    ),
]
"""Values without support. The schema already accepts them, and the operator refuses them."""

CHANGES = [
    ("spec.suspend=true", ""),
    ("spec.suspendGraceSeconds=5", ""),
    ("spec.failurePolicy.maxRestarts=5", ""),
    ("spec.activeDeadlineSeconds=50", ""),
    ("spec.ttlSecondsAfterFinished=50", ""),
    ("spec.keepCoordinatorSeconds=50", ""),
    ("spec.network.policy=Disabled", ""),
    ("spec.checkpoints.keep=7", ""),
    ("spec.tracking.tensorboard=false", ""),
    ("spec.training.steps=4", ""),
    ("spec.rollouts[0].replicas={min: 2, max: 4}", ""),
    ("spec.rewards[0].replicas.min=2", ""),
    ("spec.runner.replicas.min=2", ""),
    (f"spec.rollouts[0].template={_TEMPLATE}", ""),
    (f"spec.rewards[0].template={_TEMPLATE}", ""),
    (f"spec.trainer.template={_TEMPLATE}", ""),
    (f"spec.runner.template={_TEMPLATE}", ""),
    (f"spec.coordinator.template={_TEMPLATE}", ""),
    ("spec.initializer.template={spec: {nodeSelector: {disk: large}}}", ""),
    ("spec.trainer.sharedMemory=1Gi", ""),
    ("spec.trainer.rdma={resource: rdma/hca}", ""),
    ("spec.trainer.accelerator.profile=h100", ""),
    ("spec.rollouts[0].accelerator.profile=h100", ""),
    ("spec.trainer.nccl={NCCL_DEBUG: INFO}", ""),
    ("spec.rollouts[0].sharedMemory=1Gi", ""),
    ("spec.rollouts[0].rdma={resource: rdma/hca}", ""),
    ("spec.rollouts[0].nccl={NCCL_DEBUG: INFO}", ""),
    ("spec.failurePolicy.disruption=Block", ""),
    ("spec.rewards[0].egress={policy: Listed}", ""),
    ("spec.training.steps=2", "spec.training.steps: Invalid value: can only be raised"),
    ("spec.training.maxStaleness=2", "spec.training.maxStaleness: Invalid value: field is immutable"),
    ("spec.failurePolicy.hangSeconds=5", "spec.failurePolicy.hangSeconds: Invalid value: field is immutable"),
    ("spec.seed=2", "spec.seed: Invalid value: field is immutable; create a new RLJob"),
    ("spec.storage.retention=Delete", "spec.storage: Invalid value: field is immutable"),
    ("spec.storage.ledger={}", "spec.storage: Invalid value: field is immutable"),
    ("spec.initializer=null", "spec.initializer: Invalid value: field is immutable"),
    ("spec.initializer.command=[b]", "spec.initializer.command: Invalid value: field is immutable"),
    ("spec.models[0].source='job://b'", "spec.models: Invalid value: field is immutable"),
    ("spec.scheduling.onDeadline=regenerate", "spec.scheduling: Invalid value: field is immutable"),
    ("spec.algorithm.clipLow=0.2", "spec.algorithm: Invalid value: field is immutable"),
    ("spec.tasks[0].sampling.temperature=0.5", "spec.tasks: Invalid value: field is immutable"),
    ("spec.evaluation={}", "spec.evaluation: Invalid value: field is immutable"),
    ("spec.environments=[{name: a, url: 'http://a'}]", "spec.environments: Invalid value: entries cannot be added"),
    ("spec.rewards[0].processes=2", "spec.rewards[0].processes: Invalid value: field is immutable"),
    ("spec.rewards[0].config={a: 1}", "spec.rewards[0].config: Invalid value: field is immutable"),
    ("spec.rollouts[0].maxConcurrency=9", "spec.rollouts[0].maxConcurrency: Invalid value: field is immutable"),
    ("spec.rollouts[0].kvCacheBytes=9000000", "spec.rollouts[0].kvCacheBytes: Invalid value: field is immutable"),
    ("spec.rollouts[0].name=other", "spec.rollouts: Invalid value: entries cannot be added, removed or renamed"),
    ("spec.rollouts=[{name: main}, {name: b}]", "spec.rollouts: Invalid value: entries cannot be added"),
    ("spec.trainer.optimizer.learningRate=1e-3", "spec.trainer.optimizer: Invalid value: field is immutable"),
    ("spec.trainer.nodes=2", "spec.trainer.nodes: Invalid value: field is immutable"),
    ("spec.weightSync.inFlight=wait", "spec.weightSync: Invalid value: field is immutable"),
    ("spec.managedBy=other", "spec.managedBy: Invalid value: field is immutable"),
]
"""Change of an existing job → message of the API server; empty: it accepts the change."""
