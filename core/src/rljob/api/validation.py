"""Validation across fields of a manifest. The validator of RLJobSpec calls it once every single field is valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from rljob.api.algorithm_checks import algorithm_problems
from rljob.api.backend_checks import backend_problems
from rljob.api.engine_hosts import host_problems
from rljob.api.engine_registry import refused
from rljob.api.environments import ENVIRONMENTS, EnvironmentKind
from rljob.api.frozen_pools import frozen_pool_problems
from rljob.api.kubernetes import GPUS, PROFILE_ON_CPU
from rljob.api.model_address import HUB_FORM, S3_FORM, parse_address
from rljob.api.optimizer_checks import optimizer_problems
from rljob.api.pod_models import MAIN
from rljob.api.replica_checks import replica_problems
from rljob.api.rewards import REWARDS, RewardKind
from rljob.api.tasks import SOURCES
from rljob.api.templates import columns_of

if TYPE_CHECKING:
    from rljob.api.kubernetes import Destination, Peer
    from rljob.api.models import RLJobSpec
    from rljob.api.roles import Environment, Reward, Rollout, Trainer
    from rljob.api.tasks import Evaluation, Task, TaskData


def problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each contradiction; the field's path is relative to spec."""
    yield from _names(spec)
    yield from _models(spec)
    yield from _initializer(spec)
    yield from _tasks(spec)
    yield from _evaluation(spec)
    for i, reward in enumerate(spec.rewards):
        yield from _service(f"rewards[{i}]", reward, "scorer", REWARDS)
    for i, environment in enumerate(spec.environments):
        yield from _service(f"environments[{i}]", environment, "environment", ENVIRONMENTS)
    yield from _rollouts(spec)
    yield from _purposes(spec)
    yield from frozen_pool_problems(spec)
    yield from algorithm_problems(spec)
    yield from optimizer_problems(spec.trainer.optimizer, "trainer.optimizer")
    if spec.trainer.critic_optimizer is not None:
        yield from optimizer_problems(spec.trainer.critic_optimizer, "trainer.criticOptimizer")
    yield from _parallelism(spec.trainer)
    yield from backend_problems(spec.trainer)
    yield from _storage(spec)
    yield from replica_problems(spec)
    yield from _network(spec)
    yield from _fabric(spec)


def _names(spec: RLJobSpec) -> Iterator[str]:
    for field in ("models", "tasks", "rewards", "environments", "rollouts"):
        seen: set[str] = set()
        for i, entry in enumerate(getattr(spec, field)):
            if entry.name in seen:
                yield f"{field}[{i}].name: {entry.name!r} is used twice; give every entry its own name"
            seen.add(entry.name)


def _models(spec: RLJobSpec) -> Iterator[str]:
    if "policy" not in {model.name for model in spec.models}:
        yield "models: no model is named 'policy'; name the model to train 'policy'"
    for i, model in enumerate(spec.models):
        try:
            remote = parse_address(model.source)
        except ValueError as error:
            yield f"models[{i}].source: {error}"
            continue
        if remote is None:
            yield from _location(f"models[{i}].source", model.source, f", {HUB_FORM}, {S3_FORM}")
    for i, text in enumerate(spec.initializer.command if spec.initializer else []):
        if text.startswith("job://"):
            yield from _location(f"initializer.command[{i}]", text)


def _initializer(spec: RLJobSpec) -> Iterator[str]:
    """Refuse a command in the initializer's template: initializer.command is immutable and part of the content key."""
    containers = ((spec.initializer.template or {}).get("spec") or {}).get("containers") if spec.initializer else []
    for i, container in enumerate(containers or []):
        for field in ("command", "args"):
            if container["name"] == MAIN and field in container:
                yield (
                    f"initializer.template.spec.containers[{i}].{field}: governed by initializer.command; remove it, "
                    "and set the command there"
                )


def _location(field: str, text: str, others: str = "") -> Iterator[str]:
    """Check the location of a model or a file: job://PATH or a path. ``others``: the other forms of the field."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return
    path = PurePosixPath(rest)
    if scheme != "job":
        yield f"{field}: {scheme}:// cannot be read; write job://PATH for a path in the storage{others}, or a path"
    elif path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
        yield f"{field}: {text!r} is not a path inside the storage; write job://PATH without .. and a leading /"


def _tasks(spec: RLJobSpec) -> Iterator[str]:
    rewards = {reward.name: reward for reward in spec.rewards}
    for i, task in enumerate(spec.tasks):
        if task.reward is None and task.environment is None and task.agent is None:
            yield f"tasks[{i}].reward: required for a task without an environment or an agent; name one of rewards"
        elif task.reward is not None and task.reward not in rewards:
            yield (
                f"tasks[{i}].reward: {task.reward!r} is not defined; there are {', '.join(rewards)}; "
                "name one of them, or add it to rewards"
            )
        data_problems = list(_data(f"tasks[{i}].data", task.data))
        yield from data_problems
        fields = {f"tasks[{i}].reward": task.reward} if task.reward is not None else {}
        for j, more in enumerate(task.more_rewards):
            where = f"tasks[{i}].moreRewards[{j}].name"
            fields[where] = more.name
            if more.name not in rewards:
                yield f"{where}: {more.name!r} is not defined; there are {', '.join(rewards)}; name one of them"
            elif more.name in (task.reward, *(each.name for each in task.more_rewards[:j])):
                yield f"{where}: {more.name!r} is named twice for the task; name it once"
        for where, name in fields.items():
            builtin = rewards[name].builtin if name in rewards else None
            if builtin is not None and not data_problems and not REWARDS[builtin].accepts(task.data.sources):
                yield (
                    f"{where}: {name!r} is the builtin {builtin}, which scores "
                    f"{REWARDS[builtin].accepted} data only; use another reward"
                )
        if task.sampling.min_tokens >= task.sampling.max_tokens:
            yield (
                f"tasks[{i}].sampling.minTokens: {task.sampling.min_tokens} is not less than maxTokens, "
                f"{task.sampling.max_tokens}; lower it or raise the other"
            )
        if task.sampling.include_stop and not task.sampling.stop:
            yield f"tasks[{i}].sampling.includeStop: there is no stop string; add stop, or remove it"
        yield from _prompt(f"tasks[{i}]", task)
        yield from _task_environment(spec, f"tasks[{i}]", task)
        yield from _task_agent(f"tasks[{i}]", task)


def _evaluation(spec: RLJobSpec) -> Iterator[str]:
    known = [task.name for task in spec.tasks]
    chosen = (spec.evaluation.tasks or []) if spec.evaluation is not None else []
    for i, name in enumerate(chosen):
        if name not in known:
            yield f"evaluation.tasks[{i}]: {name!r} is not defined; there are {', '.join(known)}; name one of tasks"
        elif name in chosen[:i]:
            yield f"evaluation.tasks[{i}]: {name!r} is named twice; name it once"
    if spec.evaluation is not None:
        yield from _answers(spec.evaluation)
    if spec.training.steps == 0 and spec.evaluation is None:
        yield "training.steps: 0 only evaluates, and there is no evaluation; add evaluation, or train a step"


def _answers(evaluation: Evaluation) -> Iterator[str]:
    """Check the number of answers to a problem."""
    samples = evaluation.samples_per_problem
    if samples > 1 and evaluation.temperature == 0:
        yield (
            f"evaluation.samplesPerProblem: {samples} answers to a problem are equal at temperature 0; set 1, or a "
            "temperature above 0"
        )
    for i, k in enumerate(evaluation.pass_at):
        if k > samples:
            yield (
                f"evaluation.passAt[{i}]: {k} is more than samplesPerProblem, {samples}; raise it or lower the other"
            )
        elif k in evaluation.pass_at[:i]:
            yield f"evaluation.passAt[{i}]: {k} is given twice; give it once"


def _data(path: str, data: TaskData) -> Iterator[str]:
    given = data.sources
    if len(given) != 1:
        cause = f"{' and '.join(given)} are given" if given else "no source is given"
        yield f"{path}: {cause}; give exactly one of {', '.join(SOURCES)}"
    gym = data.reasoning_gym
    if gym is not None and "seed" in gym.config:
        yield f"{path}.reasoningGym.config.seed: governed by the job; remove it and set spec.seed"
    if gym is not None and "size" in gym.config:
        yield f"{path}.reasoningGym.config.size: governed by the job; remove it"
    if gym is not None and data.columns:
        yield f"{path}.columns: problems of reasoningGym always have question, answer and metadata; remove it"
    for name, table in (("jsonl", data.jsonl), ("parquet", data.parquet)):
        if table is not None:
            yield from _location(f"{path}.{name}.path", table.path)
            yield from _location(f"{path}.{name}.heldOutPath", table.held_out_path or "")
            if table.held_out_path is not None and table.held_out_fraction:
                yield f"{path}.{name}.heldOutFraction: heldOutPath is given too; give one of them"
    if data.datasets is not None:
        yield from _location(f"{path}.datasets.path", data.datasets.path)
        if data.datasets.held_out_split is not None and data.datasets.held_out_fraction:
            yield f"{path}.datasets.heldOutFraction: heldOutSplit is given too; give one of them"


def _prompt(path: str, task: Task) -> Iterator[str]:
    given = {"prompt": task.prompt, "messages": task.messages, "messagesColumn": task.messages_column}
    forms = [name for name, value in given.items() if value is not None]
    if len(forms) > 1:
        yield f"{path}.{forms[1]}: {forms[0]} is given too; a task has one of {', '.join(given)}"
    templates = {f"{path}.prompt": task.prompt} if task.prompt is not None else {}
    for j, message in enumerate(task.messages or []):
        templates[f"{path}.messages[{j}].content"] = message.content
    named: set[str] = set()
    for field, template in templates.items():
        try:
            named |= columns_of(template)
        except ValueError as error:
            yield f"{field}: {error}"
            return
    if templates and not named:
        yield f"{next(iter(templates))}: the template names no column; put {{question}} where the problem goes"
    if task.messages and task.messages[-1].role == "assistant":
        yield f"{path}.messages: the last message is the assistant's; end with the message that the model answers"


def _task_environment(spec: RLJobSpec, path: str, task: Task) -> Iterator[str]:
    known = [entry.name for entry in spec.environments]
    if task.environment is None:
        if task.loop == "environment":
            yield f"{path}.environment: the loop environment needs one; name one of environments, or set another loop"
        return
    if task.environment.name not in known:
        yield (
            f"{path}.environment.name: {task.environment.name!r} is not defined; there are "
            f"{', '.join(known) or 'none'}; name one of them, or add it to environments"
        )
    if task.loop == "single_turn":
        yield f"{path}.loop: single_turn makes no step in an environment; set loop: environment"
    if task.messages_column is not None:
        yield (
            f"{path}.messagesColumn: the chat of a column has no place for the first observation; write messages with "
            "{observation}"
        )
    templates = {f"{path}.prompt": [task.prompt]} if task.prompt is not None else {}
    if task.messages:
        templates[f"{path}.messages"] = [message.content for message in task.messages]
    templates[f"{path}.environment.observation"] = [task.environment.observation]
    for field, texts in templates.items():
        try:
            named = set().union(*(columns_of(text) for text in texts))
        except ValueError as error:
            if field.endswith("observation"):  # the others are checked with the prompt
                yield f"{field}: {error}"
            continue
        if "observation" not in named:
            yield f"{field}: the template does not name the observation; put {{observation}} where it goes"


def _task_agent(path: str, task: Task) -> Iterator[str]:
    if task.agent is None:
        if task.loop == "agent":
            yield f"{path}.agent: the loop agent needs one; name its program, or set another loop"
        return
    forms = [name for name, value in task.agent if value is not None]
    if len(forms) != 1:
        cause = f"{' and '.join(forms)} are given" if forms else "no program is given"
        yield f"{path}.agent: {cause}; give exactly one of function, command"
    for i, word in enumerate((task.agent.command or [])[1:], 1):
        try:
            columns_of(word)
        except ValueError as error:
            yield f"{path}.agent.command[{i}]: {error}"
    if task.agent.command is not None and not task.scored:
        yield f"{path}.reward: required for an agent with a command, which returns no reward; name one of rewards"
    if task.loop in ("single_turn", "environment"):
        yield f"{path}.loop: {task.loop} starts no agent; set loop: agent"
    if task.environment is not None:
        yield f"{path}.environment: a task has an environment or an agent; remove one of them"
    given = {"prompt": task.prompt, "messages": task.messages, "messagesColumn": task.messages_column}
    for name, value in given.items():
        if value is not None:
            yield f"{path}.{name}: the agent writes the messages itself; remove it"


def _service(
    path: str, service: Reward | Environment, what: str, builtins: Mapping[str, RewardKind | EnvironmentKind]
) -> Iterator[str]:
    """Check that a reward or an environment has one form, and the options of a builtin."""
    given = {"builtin": service.builtin, "function": service.function, "url": service.url, "local": service.local}
    forms = [name for name, value in given.items() if value is not None]
    if len(forms) > 1 or (not forms and service.template is None):
        cause = f"{' and '.join(forms)} are given" if forms else f"no {what} is given"
        yield f"{path}: {cause}; give exactly one of {', '.join(given)}"
    elif service.url is not None and service.template is not None:
        yield f"{path}.template: a service with url has no pod in the job; remove one of them"
    elif service.url is not None and service.egress is not None:
        yield f"{path}.egress: a service with url has no pod in the job; remove one of them"
    elif service.builtin is not None:
        for problem in builtins[service.builtin].option_problems(service.config):
            yield f"{path}.{problem}"
    elif service.config and service.function is None:
        yield f"{path}.config: applies to a builtin or a function only; remove it, and configure the service itself"


def _rollouts(spec: RLJobSpec) -> Iterator[str]:
    for i, rollout in enumerate(spec.rollouts):
        for refusal in refused(rollout.engine, rollout.args):
            yield f"rollouts[{i}].{refusal}"
        for problem in host_problems(rollout):
            yield f"rollouts[{i}].{problem}"
        for j, task in enumerate(() if rollout.frozen else spec.tasks):
            if task.sampling.max_tokens >= rollout.max_model_length:
                yield (
                    f"tasks[{j}].sampling.maxTokens: {task.sampling.max_tokens} leaves no room for a prompt in "
                    f"rollouts[{i}].maxModelLength {rollout.max_model_length}; lower it or raise the other"
                )


def _purposes(spec: RLJobSpec) -> Iterator[str]:
    purposes = ["" if pool.frozen else pool.purpose for pool in spec.rollouts]
    dedicated = spec.evaluation is not None and spec.evaluation.engines == "dedicated"
    if "training" not in purposes:
        yield "rollouts: no pool is for training; set purpose: training in one of them"
    if dedicated and "evaluation" not in purposes:
        yield (
            "evaluation.engines: dedicated needs a pool with purpose evaluation; set purpose: evaluation in one of "
            "rollouts, or shared"
        )
    if not dedicated and "evaluation" in purposes:
        yield (
            f"rollouts[{purposes.index('evaluation')}].purpose: evaluation.engines is not dedicated; "
            "set evaluation.engines: dedicated, or purpose: training"
        )


def _parallelism(trainer: Trainer) -> Iterator[str]:
    if trainer.processes % trainer.parallelism.replicate:
        yield (
            f"trainer.parallelism.replicate: {trainer.parallelism.replicate} does not divide the {trainer.processes} "
            "processes (nodes × processesPerNode); every copy of the model needs the same number of processes"
        )


def _storage(spec: RLJobSpec) -> Iterator[str]:
    storage = spec.storage
    if storage.claim is not None:
        given = {"size": storage.size, "className": storage.class_name, "accessModes": storage.access_modes}
        for name, value in given.items():
            if value is not None:
                yield f"storage.claim: {name} is given too; a storage has one of {name}, claim"
    if spec.downloads.claim is not None and spec.downloads.empty_dir:
        yield "downloads.emptyDir: claim is given too; downloads have one of claim, emptyDir"


def _network(spec: RLJobSpec) -> Iterator[str]:
    egress = {"network.egress": spec.network.egress}
    egress |= {f"{field}.egress": each.egress for field, each in spec.services.items() if each.egress is not None}
    lists: dict[str, Sequence[Peer | Destination]] = {
        "network.allowFrom": spec.network.allow_from,
        **{f"{field}.to": each.to for field, each in egress.items()},
        "network.nodes": spec.network.nodes,
    }
    for field, each in egress.items():
        if each.to and each.policy == "Any":
            yield f"{field}.to: policy Any allows all destinations; set policy: Listed, or remove it"
    for field, entries in lists.items():
        names = [entry.name for entry in entries]
        for i, name in enumerate(names):
            if name in names[:i]:
                yield f"{field}[{i}].name: {name!r} is used twice; give every entry its own name"


def _fabric(spec: RLJobSpec) -> Iterator[str]:
    roles: dict[str, Trainer | Rollout] = {"trainer": spec.trainer}
    roles |= {f"rollouts[{i}]": pool for i, pool in enumerate(spec.rollouts)}
    for path, role in roles.items():
        if role.rdma is not None and role.rdma.resource == GPUS:
            yield f"{path}.rdma.resource: {GPUS} is requested by accelerator; name the resource of the network adapters"
        if role.accelerator.profile is not None and role.accelerator.kind == "cpu":
            yield f"{path}.accelerator.profile: {PROFILE_ON_CPU}"
        if role.host_network and spec.network.policy == "Enabled" and not spec.network.nodes:
            yield (
                f"{path}.hostNetwork: network policies would block such pods; give the "
                "addresses of nodes in network.nodes, or set network.policy: Disabled"
            )
