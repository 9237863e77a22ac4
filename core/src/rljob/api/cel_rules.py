"""CEL rules of the API server across fields of a manifest. :mod:`rljob.api.validation` has the rules in Python.

CEL has a cost budget, estimated from the bounds of lists and strings. The operator checks the rules that exceed the
budget or that CEL cannot express, and reports violations in the job's conditions. core/tests/crd_cases.py has one case
for each CEL rule and each Python rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.backend_checks import INDIVISIBLE, INDIVISIBLE_EXPERTS, NO_STAGES, PACKED_PARTS, UNSUPPORTED
from rljob.api.cel_algorithm_rules import algorithm_rules
from rljob.api.cel_rule import CelRule, at_most_one_of, escaped
from rljob.api.cel_task_rules import builtin_reward_rules, location_rules, task_rules
from rljob.api.engine_hosts import ENGINE, ON_CPU, REPLICAS_OF_MODEL, UNEVEN_HOSTS
from rljob.api.engine_registry import spanning_engines
from rljob.api.kubernetes import GPUS, PROFILE_ON_CPU, WITH_QUEUES
from rljob.api.replica_checks import ELASTIC, NO_QUEUE, NO_QUEUES


def rules() -> Iterator[CelRule]:
    """Yield every rule for new and changed RLJobs."""
    yield from _spec()
    yield from task_rules()
    yield from location_rules()
    yield from _services()
    yield from _settings()


def _spec() -> Iterator[CelRule]:
    """Yield the rules between parts of the spec."""
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
    yield CelRule(
        "spec",
        "self.algorithm.teachers.all(teacher, !has(teacher.model) || "
        "self.models.exists(model, model.name == teacher.model))",
        "the model of a teacher is not defined; name one of models",
        ".algorithm.teachers",
    )
    for field in ("referenceModel", "criticModel"):
        name = f"self.algorithm.{field}"
        yield CelRule(
            "spec",
            f"!has({name}) || self.models.exists(model, model.name == {name})",
            "is not defined; name one of models",
            f".algorithm.{field}",
        )
    yield from builtin_reward_rules()
    yield CelRule(
        "spec",
        "self.tasks.all(task, self.rollouts.all(pool, pool.model != 'policy' || "
        "task.sampling.maxTokens < pool.maxModelLength))",
        "a task's sampling.maxTokens leaves no room for a prompt in a pool's maxModelLength; lower it or raise the "
        "other",
        ".tasks",
    )
    yield from _evaluation()
    yield from algorithm_rules()


def _evaluation() -> Iterator[CelRule]:
    """Yield the rules for the evaluation and for the purposes of pools."""
    evaluated = "has(self.evaluation)"
    dedicated = f"{evaluated} && self.evaluation.engines == 'dedicated'"
    purpose = "self.rollouts.exists(pool, pool.model == 'policy' && pool.purpose == '{}')"
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


def _services() -> Iterator[CelRule]:
    forms = ("builtin", "function", "url", "local")
    has_form = " || ".join(f"has(self.{escaped(form)})" for form in (*forms, "template"))
    for owner in ("rewards[]", "environments[]"):
        yield CelRule(
            f"spec.{owner}",
            f"{at_most_one_of(*forms)} && ({has_form})",
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
        yield CelRule(
            f"spec.{owner}.autoscaling",
            "self.provider != 'keda' || has(self.keda)",
            "required by provider keda; give the address of Prometheus in keda.serverAddress",
            ".keda",
        )
        yield CelRule(
            f"spec.{owner}.autoscaling",
            "self.provider == 'keda' || !has(self.keda)",
            "only provider keda reads it; remove it, or set provider: keda",
            ".keda",
        )
    for owner in ("rewards[]", "environments[]"):
        yield CelRule(
            f"spec.{owner}.replicas",
            "self.min > 0 || has(self.max)",
            "required with min 0; set the most pods that the service may have",
            ".max",
        )
    yield CelRule(
        "spec.rollouts[]",
        "self.model == 'policy' || !has(self.autoscaling.keda) || has(self.autoscaling.keda.query)",
        "required, rljob knows no load of a frozen pool; give a query",
        ".autoscaling.keda.query",
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
    yield from _gang()
    yield CelRule(
        "spec.trainer",
        "self.nodes * self.processesPerNode % self.parallelism.replicate == 0",
        "does not divide nodes × processesPerNode; every copy of the model needs the same number of processes",
        ".parallelism.replicate",
    )
    yield from _schedule()
    yield from _backends()
    yield from _hosts()
    for owner in ("network", "rewards[]", "environments[]"):
        yield CelRule(
            f"spec.{owner}.egress",
            "self.policy == 'Listed' || self.to.size() == 0",
            "policy Any allows all destinations; set policy: Listed, or remove it",
            ".to",
        )


def _gang() -> Iterator[CelRule]:
    """Yield the rules of the gang provider in the manifest; the operator checks them for that of the cluster."""
    with_queues = ", ".join(f"'{provider}'" for provider in WITH_QUEUES)
    yield CelRule(
        "spec.scheduling.gang",
        f"!has(self.queue) || !has(self.provider) || self.provider in [{with_queues}]",
        NO_QUEUES,
        ".queue",
    )
    yield CelRule(
        "spec.scheduling.gang",
        "!has(self.provider) || self.provider != 'kueue' || has(self.queue)",
        NO_QUEUE,
        ".queue",
    )
    fixed = "(!has({0}.replicas.max) || {0}.replicas.max <= {0}.replicas.min)"
    each = " && ".join(
        f"self.{field}.all(each, {fixed.format('each')})" for field in ("rewards", "environments", "rollouts")
    )
    gang = "self.scheduling.gang"
    yield CelRule(
        "spec",
        f"!has({gang}.provider) || {gang}.provider != 'kueue' || ({each} && {fixed.format('self.runner')})",
        ELASTIC,
        ".scheduling.gang.provider",
    )


def _schedule() -> Iterator[CelRule]:
    """Yield the rules for the learning rate; the operator checks that of a critic."""
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
    for entry in UNSUPPORTED:
        yield CelRule(
            "spec.trainer", f"self.backend != '{entry.backend}' || {entry.unset}", entry.message, f".{entry.field}"
        )
    processes, stage = "self.nodes * self.processesPerNode", "self.parallelism.tensor * self.parallelism.pipeline"
    for condition, message, field in (
        (f"{processes} % ({stage} * self.parallelism.context) == 0", INDIVISIBLE, ".parallelism"),
        (
            f"{processes} % ({stage}) != 0 || {processes} / ({stage}) % self.parallelism.expert == 0",
            INDIVISIBLE_EXPERTS,
            ".parallelism.expert",
        ),
        (
            "self.parallelism.virtualPipeline == 1 || self.parallelism.pipeline > 1",
            NO_STAGES,
            ".parallelism.virtualPipeline",
        ),
    ):
        yield CelRule("spec.trainer", f"self.backend == 'fsdp' || {condition}", message, field)
    yield CelRule(
        "spec.trainer",
        "self.backend != 'megatron' || self.parallelism.context == 1 || self.packing != 'varlen'",
        PACKED_PARTS,
        ".packing",
    )


def _hosts() -> Iterator[CelRule]:
    """Yield the rules of :mod:`rljob.api.engine_hosts`."""
    engines = ", ".join(f"'{name}'" for name in spanning_engines())
    for condition, message, field in (
        (f"self.engine in [{engines}]", ENGINE, ".hosts"),
        ("self.accelerator.kind != 'cpu'", ON_CPU, ".hosts"),
        ("self.parallelism.data == 1", REPLICAS_OF_MODEL, ".parallelism.data"),
        (
            "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data % self.hosts == 0",
            UNEVEN_HOSTS,
            ".hosts",
        ),
    ):
        yield CelRule("spec.rollouts[]", f"self.hosts == 1 || {condition}", message, field)


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
            f"spec.{role}.accelerator", "self.kind != 'cpu' || !has(self.profile)", PROFILE_ON_CPU, ".profile"
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
