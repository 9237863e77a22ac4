"""For every field of the manifest: a value, and the effect that shows that the value makes a difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.fields import consumers as c
from rljob.api.models import RLJob

Consumer = Callable[[RLJob, Path], Any]


@dataclass(frozen=True)
class Shows:
    """With ``value``, the result of ``consumer`` differs. ``given`` is set before and after; ``also`` is required by
    the value and set only after."""

    consumer: Consumer
    value: Any
    given: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """With ``value``, the manifest is rejected with a message that names the field and contains ``cause``."""

    value: Any
    cause: str


@dataclass(frozen=True)
class Changed:
    """With ``value``, the field has the outcome that its metadata states: the value is not supported yet and rejected,
    or `rljob run` warns that the field has no effect on one machine. ``given`` is set before and after; ``also`` is
    required by the value and set only after."""

    value: Any
    given: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


Outcome = Shows | Refused | Changed


def given(**fields: Any) -> tuple[str, ...]:
    """Return `--set` entries for fields of the spec, their dots written as __."""
    return tuple(f"spec.{name.replace('__', '.')}={json.dumps(value)}" for name, value in fields.items())


def source(kind: str, **fields: Any) -> tuple[str, ...]:
    """Return the entries that set data of ``kind`` and a matching reward for the first task."""
    exact = {"name": "column", "builtin": "exact_match"}
    gym = {"name": "exact", "builtin": "reasoning_gym"}
    return (
        f"spec.rewards={json.dumps([gym, exact])}",
        "spec.tasks[0].reward=column",
        f"spec.tasks[0].data={json.dumps({kind: fields})}",
    )


POD = {"spec": {"containers": [{"name": "main", "env": [{"name": "MINE", "value": "1"}]}]}}
EVALUATED = given(evaluation={"everySteps": 2, "problems": 2})
DEDICATED = given(
    evaluation__engines="dedicated",
    rollouts=[{"name": "one", "purpose": "training"}, {"name": "two", "purpose": "evaluation"}],
)
JSONL = source("jsonl", path="job://rows.jsonl")
PARQUET = source("parquet", path="job://rows.parquet")
DATASETS = source("datasets", path="job://rows")
SEEDS = (
    *source("seeds"),
    "spec.tasks[0].prompt='{seed}'",
    "spec.rewards[column].builtin=length",
    "spec.rewards[column].config={max: 3}",
)
MESSAGES = (*JSONL, 'spec.tasks[0].messages=[{"role": "user", "content": "{question}"}]')

LAKE = given(environments=[{"name": "lake", "builtin": "frozen_lake"}])
IN_LAKE = (
    *given(environments=[{"name": "lake", "builtin": "frozen_lake"}, {"name": "other", "builtin": "sokoban"}]),
    'spec.tasks[0].environment={"name": "lake"}',
    "spec.tasks[0].loop=environment",
    'spec.tasks[0].data={"seeds": {}}',
    "spec.tasks[0].reward=null",
)

IN_AGENT = (
    'spec.tasks[0].agent={"function": "e2e.fakes.agents:ask_once"}',
    "spec.tasks[0].loop=agent",
)

RDMA = {"name": "main", "rdma": {"resource": "rdma/hca"}}
REMOTE = given(models=[{"name": "policy", "source": "hf://a/b"}])
LAKE_LISTED = given(
    environments=[{"name": "lake", "builtin": "frozen_lake", "egress": {"policy": "Listed"}}],
)
LISTED = given(rewards=[{"name": "exact", "builtin": "reasoning_gym", "egress": {"policy": "Listed"}}])
TWO_POOLS = [{"name": "main"}, {"name": "big", "model": "other", "maxModelLength": 100_000}]
TWO_MODELS = [{"name": "policy", "source": "job://model"}, {"name": "other", "source": "job://other-model"}]
TAUGHT = given(models=TWO_MODELS, algorithm={"teachers": [{"model": "other"}]})
SPARE = given(rewards=[{"name": "spare", "builtin": "reasoning_gym"}, {"name": "exact", "builtin": "reasoning_gym"}])

MEGATRON = given(trainer__backend="megatron", trainer__processesPerNode=5)
TWO_STAGES = {"trainer__backend": "megatron", "trainer__processesPerNode": 2, "trainer__parallelism__pipeline": 2}
UNCORRECTED = given(algorithm={"correction": "none"})
BEHAVIOR = given(algorithm={"ratio": "behavior", "correction": "none"})
SAPO = given(algorithm={"preset": "sapo", "ratio": "behavior", "correction": "none"})
VESPO = given(algorithm={"objective": "vespo", "ratio": "behavior", "correction": "none"})
CLIP_COV = given(algorithm={"objective": "clip_cov", "covarianceShare": 0.2, "covarianceLow": 0})
KL_COV = given(algorithm={"objective": "kl_cov", "ratio": "behavior", "correction": "none"})
PPO = given(algorithm={"preset": "ppo"})
TWO_REWARDS = given(
    rewards=[
        {"name": "exact", "builtin": "reasoning_gym"},
        {"name": "far", "url": "http://a"},
        {"name": "near", "url": "http://b"},
    ]
)
ADDED = ('spec.tasks[0].moreRewards=[{"name": "near", "weight": 2}]',)

PROMETHEUS = {"provider": "keda", "keda": {"serverAddress": "http://prometheus"}}
KEDA_REWARD = given(
    rewards=[{"name": "exact", "builtin": "reasoning_gym", "replicas": {"max": 2}, "autoscaling": PROMETHEUS}]
)
KEDA_LAKE = given(
    environments=[{"name": "lake", "builtin": "frozen_lake", "replicas": {"max": 2}, "autoscaling": PROMETHEUS}]
)
KEDA_POOL = given(rollouts=[{"name": "main", "replicas": {"max": 2}, "autoscaling": PROMETHEUS}])
KEDA_RUNNER = given(runner={"replicas": {"max": 2}, "autoscaling": PROMETHEUS})
RANGE = {
    "rewards": given(rewards=[{"name": "exact", "builtin": "reasoning_gym", "replicas": {"max": 2}}]),
    "environments": given(environments=[{"name": "lake", "builtin": "frozen_lake", "replicas": {"max": 2}}]),
    "rollouts": given(rollouts=[{"name": "main", "replicas": {"max": 2}}]),
    "runner": given(runner={"replicas": {"max": 2}}),
}
WITH_KEDA = {
    field: (f"spec.{field}{'' if field == 'runner' else '[0]'}.autoscaling.keda={{serverAddress: 'http://a'}}",)
    for field in RANGE
}

KUBERNETES = {"metadata.namespace", "metadata.labels", "metadata.annotations"}
"""Fields that rljob does not read: the API server stores the object by them."""

ROWS: dict[str, Outcome] = {
    "apiVersion": Refused("rljob.dev/v2", "must be 'rljob.dev/v1alpha1'"),
    "kind": Refused("Job", "must be 'RLJob'"),
    "metadata.name": Shows(c.directory, "other"),
    "metadata.namespace": Changed("research"),
    "metadata.labels": Changed({"team": "a"}),
    "metadata.annotations": Changed({"note": "mine"}),
    "spec.seed": Shows(c.prompts, 2),
    "spec.storage.size": Changed("1Gi"),
    "spec.storage.className": Changed("fast"),
    "spec.storage.accessModes": Changed(["ReadWriteOnce"]),
    "spec.storage.ledger.size": Changed("1Gi"),
    "spec.storage.ledger.className": Changed("fast"),
    "spec.storage.retention": Changed("Delete"),
    "spec.storage.claim": Changed("mine"),
    "spec.initializer.command": Shows(
        c.initialized, ["make-other", "job://model"], given(initializer={"command": ["make-model", "job://model"]})
    ),
    "spec.initializer.template": Shows(c.prepared, POD, given(initializer={"command": ["make-model", "job://model"]})),
    "spec.models.name": Refused("base", "no model is named 'policy'"),
    "spec.models.source": Shows(c.trained, "job://other-model"),
    "spec.downloads.claim": Changed("mine", REMOTE),
    "spec.downloads.emptyDir": Changed(True, REMOTE),
    "spec.downloads.hubEndpoint": Shows(c.commands, "http://mirror", REMOTE),
    "spec.downloads.s3Endpoint": Shows(c.commands, "http://minio", REMOTE),
    "spec.downloads.secret": Changed("mine", REMOTE),
    "spec.models.placement": Changed("service"),
    "spec.training.steps": Shows(c.dispatched, 3),
    "spec.training.promptsPerStep": Shows(c.dispatched, 3),
    "spec.training.samplesPerPrompt": Shows(c.dispatched, 3),
    "spec.training.maxStaleness": Shows(c.admitted, 0),
    "spec.scheduling.redundancy.groups": Shows(c.dispatched, 1),
    "spec.scheduling.redundancy.members": Shows(c.dispatched, 1),
    "spec.scheduling.onDeadline": Shows(c.scheduled, "regenerate"),
    "spec.scheduling.gang.provider": Changed("volcano"),
    "spec.scheduling.gang.queue": Changed("mine", given(scheduling={"gang": {"provider": "volcano"}})),
    "spec.scheduling.priorityClassName": Changed("high"),
    "spec.scheduling.topology.key": Changed("rack"),
    "spec.algorithm.preset": Shows(c.trained, "dr_grpo"),
    "spec.algorithm.advantage": Shows(c.trained, "group_centered"),
    "spec.algorithm.objective": Shows(c.trained, "e2e.fakes.extensions:reinforce"),
    "spec.algorithm.aggregation": Shows(c.trained, "seq_mean_token_mean"),
    "spec.algorithm.ratio": Shows(c.trained, "behavior", UNCORRECTED),
    "spec.algorithm.minibatches": Shows(c.trained, 2),
    "spec.algorithm.groupFilter": Shows(c.dispatched, "nonconstant"),
    "spec.algorithm.clipLow": Shows(c.trained, 0.4, BEHAVIOR),
    "spec.algorithm.clipHigh": Shows(c.trained, 0.4, BEHAVIOR),
    "spec.algorithm.dualClip": Shows(c.trained, 1.1, BEHAVIOR),
    "spec.algorithm.gatePositive": Shows(c.trained, 3, SAPO),
    "spec.algorithm.gateNegative": Shows(c.trained, 3, SAPO),
    "spec.algorithm.kernelPowerPositive": Shows(c.trained, 1, VESPO),
    "spec.algorithm.kernelDecayPositive": Shows(c.trained, 1, VESPO),
    "spec.algorithm.kernelPowerNegative": Shows(c.trained, 1, VESPO),
    "spec.algorithm.kernelDecayNegative": Shows(c.trained, 1, VESPO),
    "spec.algorithm.covarianceShare": Shows(c.trained, 0.5, CLIP_COV),
    "spec.algorithm.covarianceLow": Shows(c.trained, 0.5, CLIP_COV),
    "spec.algorithm.covarianceHigh": Shows(c.trained, 1e-3, CLIP_COV),
    "spec.algorithm.covariancePenalty": Shows(c.trained, 10, KL_COV),
    "spec.algorithm.logRatioPenalty": Shows(c.trained, 1, given(algorithm={"preset": "kimi", "minibatches": 2})),
    "spec.algorithm.positiveCoefficient": Shows(c.trained, 0.1),
    "spec.algorithm.entropyCoefficient": Shows(c.trained, 0.1),
    "spec.algorithm.klCoefficient": Shows(c.trained, 3),
    "spec.algorithm.klIn": Shows(c.trained, "reward", given(algorithm={"klCoefficient": 3})),
    "spec.algorithm.klEstimator": Shows(c.trained, "k2", given(algorithm={"klCoefficient": 3})),
    "spec.algorithm.referenceModel": Shows(
        c.trained, "other", given(algorithm={"klCoefficient": 3}), given(models=TWO_MODELS)
    ),
    "spec.algorithm.teachers.model": Shows(c.trained, "other", also=given(models=TWO_MODELS)),
    "spec.algorithm.referencePool": Shows(
        c.trained, "big", given(algorithm={"klCoefficient": 3}), also=given(models=TWO_MODELS, rollouts=TWO_POOLS)
    ),
    "spec.algorithm.teachers.pool": Shows(c.trained, "big", also=given(models=TWO_MODELS, rollouts=TWO_POOLS)),
    "spec.algorithm.teachers.weight": Shows(c.trained, 3, TAUGHT),
    "spec.algorithm.teachers.tasks": Shows(c.trained, ["more"], TAUGHT),
    "spec.algorithm.gaeLambda": Shows(c.trained, 0.5, PPO),
    "spec.algorithm.gaeLengthFactor": Shows(c.trained, 0.5, PPO),
    "spec.algorithm.criticModel": Shows(c.trained, "other", PPO, given(models=TWO_MODELS)),
    "spec.algorithm.criticWarmupSteps": Shows(c.trained, 1, PPO),
    "spec.algorithm.valueLambda": Shows(c.trained, 0.5, PPO),
    "spec.algorithm.valueClip": Shows(
        c.trained,
        1e-4,
        given(algorithm={"preset": "ppo", "minibatches": 2}, trainer__optimizer__learningRate=0.1),
    ),
    "spec.algorithm.discount": Shows(c.trained, 0.5, given(algorithm={"preset": "reinforce_pp"})),
    "spec.algorithm.stepCoefficient": Shows(
        c.trained, 3, ('spec.tasks[0].loop="e2e.fakes.extensions:two_turns"', *given(algorithm={"preset": "gigpo"}))
    ),
    "spec.algorithm.correction": Shows(c.trained, "icepop"),
    "spec.algorithm.correctionLevel": Shows(c.trained, "geometric"),
    "spec.algorithm.correctionCap": Shows(c.trained, 1.5),
    "spec.algorithm.correctionFloor": Shows(c.trained, 0.9, given(algorithm={"correction": "icepop"})),
    "spec.algorithm.maskGeometricBelow": Shows(c.trained, 0.99),
    "spec.algorithm.maskGeometricAbove": Shows(c.trained, 1.01),
    "spec.algorithm.vetoBelow": Shows(c.trained, 0.5),
    "spec.algorithm.maskProbabilityGap": Shows(c.trained, 0.003),
    "spec.algorithm.maskNegativeKl": Shows(c.trained, 0.01),
    "spec.algorithm.truncatedWeight": Shows(c.trained, 0.5),
    "spec.algorithm.lengthExponent": Shows(c.trained, 1),
    "spec.algorithm.difficultyExponent": Shows(c.trained, 2),
    "spec.algorithm.lossScale": Shows(c.trained, 0.01),
    "spec.algorithm.rewardMean": Shows(c.trained, "running", given(algorithm={"advantage": "reward"})),
    "spec.algorithm.rewardStd": Shows(c.trained, "batch", given(algorithm={"advantage": "reward"})),
    "spec.algorithm.klTarget": Shows(c.adapted, 0.5, given(algorithm={"klCoefficient": 3})),
    "spec.algorithm.klHorizon": Shows(c.adapted, 5, given(algorithm={"klCoefficient": 3, "klTarget": 0.5})),
    "spec.algorithm.rewardClip": Shows(c.trained, 1),
    "spec.algorithm.overlongBuffer": Shows(c.trained, 10),
    "spec.algorithm.overlongPenalty": Shows(c.trained, 3, given(algorithm={"overlongBuffer": 10})),
    "spec.algorithm.whitenAdvantages": Shows(c.trained, True),
    "spec.algorithm.advantageClip": Shows(c.trained, 0.5),
    "spec.algorithm.difficultyAbove": Shows(c.trained, 1),
    "spec.algorithm.difficultyBelow": Shows(c.trained, 1),
    "spec.tasks.name": Shows(c.dispatched, "other"),
    "spec.tasks.weight": Shows(c.admitted, 3.0),
    "spec.tasks.data.reasoningGym.dataset": Shows(c.prompts, "products"),
    "spec.tasks.data.reasoningGym.config": Shows(c.prompts, {"min_terms": 5, "max_terms": 5}),
    "spec.tasks.data.jsonl.path": Shows(c.prompts, "job://others.jsonl", JSONL),
    "spec.tasks.data.jsonl.heldOutPath": Shows(c.prompts, "job://others.jsonl", JSONL),
    "spec.tasks.data.jsonl.heldOutFraction": Shows(c.prompts, 0.5, JSONL),
    "spec.tasks.data.jsonl.shuffle": Shows(c.prompts, False, JSONL),
    "spec.tasks.data.parquet.path": Shows(c.prompts, "job://others.parquet", PARQUET),
    "spec.tasks.data.parquet.heldOutPath": Shows(c.prompts, "job://others.parquet", PARQUET),
    "spec.tasks.data.parquet.heldOutFraction": Shows(c.prompts, 0.5, PARQUET),
    "spec.tasks.data.parquet.shuffle": Shows(c.prompts, False, PARQUET),
    "spec.tasks.data.datasets.path": Shows(c.prompts, "job://others", DATASETS),
    "spec.tasks.data.datasets.split": Shows(c.prompts, "third", DATASETS),
    "spec.tasks.data.datasets.heldOutSplit": Shows(c.prompts, "test", DATASETS),
    "spec.tasks.data.datasets.heldOutFraction": Shows(c.prompts, 0.5, DATASETS),
    "spec.tasks.data.datasets.shuffle": Shows(c.prompts, False, DATASETS),
    "spec.tasks.data.seeds.train": Shows(c.prompts, 1, SEEDS),
    "spec.tasks.data.columns": Shows(c.prompts, {"question": "prompt"}, JSONL),
    "spec.tasks.prompt": Shows(c.prompts, "{question} ="),
    "spec.tasks.messages.role": Shows(c.prompts, "system", MESSAGES),
    "spec.tasks.messages.content": Shows(c.prompts, "{answer}", MESSAGES),
    "spec.tasks.messagesColumn": Shows(c.prompts, "chat", JSONL),
    "spec.tasks.loop": Shows(c.loops, "e2e.fakes.extensions:two_turns"),
    "spec.tasks.environment.name": Shows(c.acting, "other", IN_LAKE),
    "spec.tasks.environment.maxTurns": Shows(c.acting, 3, IN_LAKE),
    "spec.tasks.environment.observation": Shows(c.acting, "then {observation}", IN_LAKE),
    "spec.tasks.environment.onContextLimit": Shows(c.acting, "fail", IN_LAKE),
    "spec.tasks.agent.function": Shows(c.programs, "e2e.fakes.agents:ask_twice", IN_AGENT),
    "spec.tasks.agent.command": Shows(
        c.programs, ["sh", "-c", "true"], IN_AGENT, ("spec.tasks[0].agent.function=null",)
    ),
    "spec.tasks.reward": Shows(
        c.requested,
        "far",
        given(rewards=[{"name": "exact", "builtin": "reasoning_gym"}, {"name": "far", "url": "http://a"}]),
    ),
    "spec.tasks.rewardColumn": Shows(c.routed, "judged", TWO_REWARDS),
    "spec.tasks.moreRewards.name": Shows(c.routed, "far", (*TWO_REWARDS, *ADDED)),
    "spec.tasks.moreRewards.weight": Shows(c.routed, 0.5, (*TWO_REWARDS, *ADDED)),
    "spec.tasks.sampling.temperature": Shows(c.requested, 0.5),
    "spec.tasks.sampling.maxTokens": Shows(c.requested, 17),
    "spec.tasks.sampling.minTokens": Shows(c.requested, 3),
    "spec.tasks.sampling.stop": Shows(c.requested, ["\n"]),
    "spec.tasks.sampling.includeStop": Shows(c.answered, True, ('spec.tasks[0].sampling.stop=["b"]',)),
    "spec.tasks.groupFilter.kind": Shows(c.scheduled, "nonconstant"),
    "spec.tasks.groupFilter.minMean": Shows(c.scheduled, 0.1),
    "spec.tasks.groupFilter.maxMean": Shows(c.scheduled, 0.9),
    "spec.tasks.groupFilter.function": Shows(c.group_filters, "e2e.fakes.extensions:accept"),
    "spec.evaluation.everySteps": Shows(c.dispatched, 3, EVALUATED),
    "spec.evaluation.tasks": Shows(c.dispatched, ["more"], EVALUATED),
    "spec.evaluation.problems": Shows(c.dispatched, 3, EVALUATED),
    "spec.evaluation.engines": Shows(
        c.dispatched,
        "dedicated",
        EVALUATED,
        given(rollouts=[{"name": "main"}, {"name": "judge", "purpose": "evaluation"}]),
    ),
    "spec.evaluation.samplesPerProblem": Shows(c.dispatched, 2, EVALUATED),
    "spec.evaluation.passAt": Shows(c.dispatched, [1], EVALUATED),
    "spec.evaluation.passReward": Shows(c.dispatched, 2, EVALUATED),
    "spec.evaluation.temperature": Shows(c.requested, 0, EVALUATED),
    "spec.rewards.name": Shows(c.commands, "other", SPARE),
    "spec.rewards.builtin": Shows(c.scored, "exact_match"),
    "spec.rewards.function": Shows(c.scored, "e2e.fakes.extensions:one", also=("spec.rewards[0].builtin=null",)),
    "spec.rewards.config": Shows(
        c.scored, {"column": "result"}, given(rewards=[{"name": "exact", "builtin": "exact_match"}])
    ),
    "spec.rewards.url": Shows(c.commands, "http://far", given(rewards=[{"name": "exact", "url": "http://near"}])),
    "spec.rewards.local.command": Shows(
        c.commands, ["./other"], given(rewards=[{"name": "exact", "local": {"command": ["./serve"]}}])
    ),
    "spec.rewards.template": Shows(c.commands, POD),
    "spec.rewards.replicas.min": Changed(2),
    "spec.rewards.replicas.max": Changed(2),
    "spec.rewards.autoscaling.provider": Changed("keda", RANGE["rewards"], also=WITH_KEDA["rewards"]),
    "spec.rewards.autoscaling.targetInFlight": Changed(3, KEDA_REWARD),
    "spec.rewards.autoscaling.scaleOutSeconds": Changed(3, KEDA_REWARD),
    "spec.rewards.autoscaling.scaleInSeconds": Changed(3, KEDA_REWARD),
    "spec.rewards.autoscaling.keda.serverAddress": Changed("http://other", KEDA_REWARD),
    "spec.rewards.autoscaling.keda.query": Changed("sum(up)", KEDA_REWARD),
    "spec.rewards.processes": Shows(c.served, 2),
    "spec.rewards.timeoutSeconds": Shows(c.served, 20),
    "spec.rewards.egress.policy": Changed("Listed"),
    "spec.rewards.egress.to.name": Changed("mine", LISTED),
    "spec.rewards.egress.to.cidr": Changed("10.0.0.0/8", LISTED),
    "spec.rewards.memoryBytes": Shows(c.served, 1 << 25),
    "spec.rewards.tokenIds": Shows(c.sent_token_ids, True),
    "spec.rewards.notScoredReward": Shows(c.not_scored, -1),
    "spec.environments.name": Shows(c.commands, "other", LAKE),
    "spec.environments.builtin": Shows(c.observed, "sokoban", LAKE),
    "spec.environments.function": Shows(
        c.observed, "e2e.fakes.episodes:FaultyCounter", LAKE, ("spec.environments[0].builtin=null",)
    ),
    "spec.environments.config": Shows(c.observed, {"size": 5}, LAKE),
    "spec.environments.url": Shows(c.commands, "http://far", given(environments=[{"name": "a", "url": "http://near"}])),
    "spec.environments.template": Shows(c.commands, POD, LAKE),
    "spec.environments.local.command": Shows(
        c.commands, ["./other"], given(environments=[{"name": "a", "local": {"command": ["./serve"]}}])
    ),
    "spec.environments.timeoutSeconds": Shows(c.episodes, 5, LAKE),
    "spec.environments.maxSessions": Shows(c.episodes, 5, LAKE),
    "spec.environments.idleSeconds": Shows(c.episodes, 5, LAKE),
    "spec.environments.egress.policy": Changed("Listed", LAKE),
    "spec.environments.egress.to.name": Changed("mine", LAKE_LISTED),
    "spec.environments.egress.to.cidr": Changed("10.0.0.0/8", LAKE_LISTED),
    "spec.environments.replicas.min": Changed(2, LAKE),
    "spec.environments.replicas.max": Changed(2, LAKE),
    "spec.environments.autoscaling.provider": Changed("keda", RANGE["environments"], also=WITH_KEDA["environments"]),
    "spec.environments.autoscaling.targetInFlight": Changed(3, KEDA_LAKE),
    "spec.environments.autoscaling.scaleOutSeconds": Changed(3, KEDA_LAKE),
    "spec.environments.autoscaling.scaleInSeconds": Changed(3, KEDA_LAKE),
    "spec.environments.autoscaling.keda.serverAddress": Changed("http://other", KEDA_LAKE),
    "spec.environments.autoscaling.keda.query": Changed("sum(up)", KEDA_LAKE),
    "spec.trainer.backend": Shows(c.planned, "megatron"),
    "spec.trainer.parallelism.replicate": Shows(c.planned, 2, given(trainer__processesPerNode=2)),
    "spec.trainer.parallelism.tensor": Shows(c.misfits, 5, MEGATRON),
    "spec.trainer.parallelism.pipeline": Shows(c.misfits, 5, MEGATRON),
    "spec.trainer.parallelism.virtualPipeline": Shows(c.misfits, 2, given(**TWO_STAGES)),
    "spec.trainer.parallelism.context": Shows(c.parted, 5, MEGATRON),
    "spec.trainer.parallelism.expert": Shows(c.misfits, 5, MEGATRON),
    "spec.trainer.nodes": Shows(c.unsupported, 2),
    "spec.trainer.processesPerNode": Shows(c.commands, 2),
    "spec.trainer.accelerator.kind": Shows(c.commands, "nvidia"),
    "spec.trainer.accelerator.profile": Changed("h100"),
    "spec.trainer.sharedMemory": Changed("1Gi"),
    "spec.trainer.rdma.resource": Changed("rdma/other", given(trainer__rdma={"resource": "rdma/hca"})),
    "spec.trainer.rdma.count": Changed(2, given(trainer__rdma={"resource": "rdma/hca"})),
    "spec.trainer.nccl": Shows(c.commands, {"NCCL_DEBUG": "INFO"}),
    "spec.trainer.hostNetwork": Changed(True, given(network__policy="Disabled")),
    "spec.trainer.template": Shows(c.commands, POD),
    "spec.trainer.dtype": Shows(c.trained, "bfloat16"),
    "spec.trainer.microbatchTokens": Shows(c.trained, 16),
    "spec.trainer.packing": Shows(c.trained, "varlen"),
    "spec.trainer.recompute": Shows(c.saved_for_backward, "layer"),
    "spec.trainer.lora.rank": Shows(c.trained, 2, given(trainer__lora={"rank": 4})),
    "spec.trainer.lora.alpha": Shows(c.trained, 32, given(trainer__lora={"rank": 4})),
    "spec.trainer.lora.targets": Shows(c.trained, ["q_proj"], given(trainer__lora={"rank": 4})),
    "spec.trainer.optimizer.learningRate": Shows(c.trained, 1e-3),
    "spec.trainer.optimizer.betas": Shows(c.trained, [0.5, 0.9]),
    "spec.trainer.optimizer.epsilon": Shows(c.trained, 1e-2),
    "spec.trainer.optimizer.weightDecay": Shows(c.trained, 1.0, given(trainer__optimizer__learningRate=1e-2)),
    "spec.trainer.optimizer.decayed": Shows(
        c.trained, "matrices", given(trainer__optimizer__learningRate=1e-2, trainer__optimizer__weightDecay=1.0)
    ),
    "spec.trainer.optimizer.maxGradNorm": Shows(c.trained, 1e-3, given(trainer__optimizer__epsilon=1e-2)),
    "spec.trainer.optimizer.maxSkippedUpdates": Shows(c.skipped, 2),
    "spec.trainer.optimizer.warmupSteps": Shows(c.trained, 10),
    "spec.trainer.optimizer.schedule": Shows(c.trained, "linear", also=("spec.trainer.optimizer.scheduleSteps=2",)),
    "spec.trainer.optimizer.scheduleSteps": Shows(
        c.trained, 4, given(trainer__optimizer={"schedule": "linear", "scheduleSteps": 2})
    ),
    "spec.trainer.optimizer.decaySteps": Shows(
        c.trained, 3, given(trainer__optimizer={"schedule": "wsd", "scheduleSteps": 3, "decaySteps": 2})
    ),
    "spec.trainer.optimizer.finalRatio": Shows(
        c.trained, 0.5, given(trainer__optimizer={"schedule": "linear", "scheduleSteps": 2})
    ),
    "spec.trainer.optimizer.offload": Shows(c.planned, True, given(trainer__accelerator__kind="nvidia")),
    "spec.rollouts.name": Shows(c.commands, "other"),
    "spec.rollouts.model": Shows(
        c.commands,
        "judge",
        given(rollouts=[{"name": "one"}, {"name": "two"}]),
        given(models=[{"name": "policy", "source": "job://model"}, {"name": "judge", "source": "job://other-model"}]),
    ),
    "spec.rollouts.engine": Shows(c.launched, "e2e.fakes.engine_adapter:SleepingEngine"),
    "spec.rollouts.purpose": Shows(
        c.dispatched, "evaluation", (*EVALUATED, *DEDICATED), ("spec.rollouts[1].purpose=training",)
    ),
    "spec.rollouts.hosts": Shows(c.unsupported, 2, given(rollouts=[{"name": "main", "parallelism": {"tensor": 2}}])),
    "spec.rollouts.parallelism.tensor": Shows(c.launched, 2),
    "spec.rollouts.parallelism.pipeline": Shows(c.launched, 2),
    "spec.rollouts.parallelism.data": Shows(c.launched, 2),
    "spec.rollouts.accelerator.kind": Shows(c.commands, "nvidia"),
    "spec.rollouts.accelerator.profile": Changed("h100"),
    "spec.rollouts.placement": Changed("Colocated"),
    "spec.rollouts.sharedMemory": Changed("1Gi"),
    "spec.rollouts.rdma.resource": Changed("rdma/other", given(rollouts=[RDMA])),
    "spec.rollouts.rdma.count": Changed(2, given(rollouts=[RDMA])),
    "spec.rollouts.nccl": Shows(c.commands, {"NCCL_DEBUG": "INFO"}),
    "spec.rollouts.hostNetwork": Changed(True, given(network__policy="Disabled")),
    "spec.rollouts.template": Shows(c.commands, POD),
    "spec.rollouts.replicas.min": Shows(c.commands, 2),
    "spec.rollouts.replicas.max": Changed(2),
    "spec.rollouts.autoscaling.provider": Changed("keda", RANGE["rollouts"], also=WITH_KEDA["rollouts"]),
    "spec.rollouts.autoscaling.scaleOutSeconds": Changed(3, KEDA_POOL),
    "spec.rollouts.autoscaling.scaleInSeconds": Changed(3, KEDA_POOL),
    "spec.rollouts.autoscaling.keda.serverAddress": Changed("http://other", KEDA_POOL),
    "spec.rollouts.autoscaling.keda.query": Changed("sum(up)", KEDA_POOL),
    "spec.rollouts.maxConcurrency": Shows(c.launched, 8),
    "spec.rollouts.maxModelLength": Shows(c.launched, 512),
    "spec.rollouts.dtype": Shows(c.launched, "bfloat16"),
    "spec.rollouts.kvCacheBytes": Shows(c.launched, 1 << 24),
    "spec.rollouts.args": Shows(c.launched, ["--seed=1"]),
    "spec.runner.replicas.min": Shows(c.commands, 2),
    "spec.runner.replicas.max": Changed(2),
    "spec.runner.autoscaling.provider": Changed("keda", RANGE["runner"], also=WITH_KEDA["runner"]),
    "spec.runner.autoscaling.targetInFlight": Changed(3, KEDA_RUNNER),
    "spec.runner.autoscaling.scaleOutSeconds": Changed(3, KEDA_RUNNER),
    "spec.runner.autoscaling.scaleInSeconds": Changed(3, KEDA_RUNNER),
    "spec.runner.autoscaling.keda.serverAddress": Changed("http://other", KEDA_RUNNER),
    "spec.runner.autoscaling.keda.query": Changed("sum(up)", KEDA_RUNNER),
    "spec.runner.template": Shows(c.commands, POD),
    "spec.coordinator.template": Shows(c.commands, POD),
    "spec.weightSync.transport": Shows(c.published, "nccl"),
    "spec.weightSync.inFlight": Shows(c.dispatched, "abort"),
    "spec.weightSync.groups": Changed("shared"),
    "spec.weightSync.bucketBytes": Shows(c.dispatched, 1 << 20),
    "spec.weightSync.timeoutSeconds": Shows(c.dispatched, 30),
    "spec.weightSync.probeTolerance": Shows(c.dispatched, 1e-6),
    "spec.weightSync.bfloat16Tolerance.mean": Shows(c.dispatched, 1e-6, given(trainer__dtype="bfloat16")),
    "spec.weightSync.bfloat16Tolerance.max": Shows(c.dispatched, 1e-6, given(trainer__dtype="bfloat16")),
    "spec.checkpoints.everySteps": Shows(c.dispatched, 1),
    "spec.checkpoints.keep": Shows(c.dispatched, 1, given(checkpoints__everySteps=1)),
    "spec.checkpoints.uri": Shows(c.copied, "s3://bucket/run"),
    "spec.tracking.tensorboard": Shows(c.tracked, False),
    "spec.network.policy": Changed("Disabled"),
    "spec.network.allowFrom.name": Changed("mine"),
    "spec.network.allowFrom.namespaceLabels": Changed({"a": "b"}, given(network__allowFrom=[{"name": "mine"}])),
    "spec.network.allowFrom.podLabels": Changed({"a": "b"}, given(network__allowFrom=[{"name": "mine"}])),
    "spec.network.egress.policy": Changed("Listed"),
    "spec.network.egress.to.name": Changed("mine", given(network__egress__policy="Listed")),
    "spec.network.egress.to.cidr": Changed("10.0.0.0/8", given(network__egress__policy="Listed")),
    "spec.network.nodes.name": Changed("mine"),
    "spec.network.nodes.cidr": Changed("10.0.0.0/8"),
    "spec.suspend": Shows(c.unsupported, True),
    "spec.suspendGraceSeconds": Shows(c.grace, 5),
    "spec.failurePolicy.maxRestarts": Shows(c.restarts, 1),
    "spec.failurePolicy.hangSeconds": Shows(c.restarts, 5),
    "spec.failurePolicy.stallSeconds": Shows(c.requested, 5),
    "spec.failurePolicy.disruption": Changed("Block"),
    "spec.failurePolicy.pendingSeconds": Changed(60),
    "spec.activeDeadlineSeconds": Shows(c.deadline_error, 60),
    "spec.ttlSecondsAfterFinished": Changed(60),
    "spec.keepCoordinatorSeconds": Changed(60),
    "spec.managedBy": Changed("example.com/other"),
}
"""Path without indices → outcome of setting it. In a list the first entry is changed, or added to an empty list."""


def _of_critic(row: Shows) -> Shows:
    """Return the row of the same field of the critic's optimizer."""

    def moved(entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(entry.replace("trainer.optimizer", "trainer.criticOptimizer") for entry in entries)

    before = (*PPO, *given(trainer__criticOptimizer={}), *moved(row.given))
    return Shows(row.consumer, row.value, before, moved(row.also))


ROWS |= {
    path.replace("optimizer", "criticOptimizer"): _of_critic(row)
    for path, row in ROWS.items()
    if path.startswith("spec.trainer.optimizer.") and isinstance(row, Shows)
}
