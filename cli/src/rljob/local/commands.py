"""Plans a job's components as commands of this machine, as the renderer plans pods in a cluster. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rljob.api.gpu_names import VISIBLE
from rljob.api.models import RLJob
from rljob.api.pod_models import main_container, main_variables
from rljob.api.resolve import in_storage
from rljob.api.roles import Coordinator, Environment, Reward, Rollout, Runner, Trainer
from rljob.local.gpu_assignment import assign
from rljob.local.processes import ProcessCommand
from rljob.protocol.environment import SEED
from rljob.protocol.gpus import Gpu
from rljob.protocol.model_cache import endpoint_variables

HOST = "127.0.0.1"
INITIALIZER = "initializer"
Templated: TypeAlias = Trainer | Rollout | Reward | Environment | Runner | Coordinator
SERVICES = {"reward": "rljob.rewards.main", "environment": "rljob.environments.main"}
"""Kind of a service → module that serves it."""


@dataclass(frozen=True)
class LocalContext:
    """Where a job's components run.

    ``storage``: the run directory. ``ports``: a port for each of :func:`servers`. ``tokens``: a token for each role.
    ``gpus``: GPUs that the job may use.
    """

    storage: Path
    ports: dict[str, int]
    tokens: dict[str, str]
    gpus: tuple[Gpu, ...] = ()

    @property
    def coordinator_url(self) -> str:
        """Address of the coordinator."""
        return f"http://{HOST}:{self.ports['coordinator']}"


def servers(job: RLJob) -> list[str]:
    """Return the components that listen on a port."""
    engines = [name for pool in job.spec.frozen_pools for name in engine_names(pool)]
    return ["coordinator", *(f"{kind}-{service.name}" for kind, service in services(job)), *engines]


def engine_names(pool: Rollout) -> list[str]:
    """Return the components that run the engines of a pool."""
    return [f"rollout-{pool.name}-{i}" for i in range(pool.replicas.min)]


def services(job: RLJob) -> list[tuple[str, Reward | Environment]]:
    """Return the kind and the entry of every service that is started."""
    found: list[tuple[str, Reward | Environment]] = [("reward", reward) for reward in job.spec.rewards]
    found += [("environment", environment) for environment in job.spec.environments]
    return [(kind, service) for kind, service in found if service.url is None]


def components(job: RLJob, here: LocalContext) -> list[ProcessCommand]:
    """Return the commands of a resolved job's components, in the order of their start."""
    common = common_environment(here.storage) | endpoint_variables(job.spec.downloads)
    assigned = assign(job, here.gpus)

    def component(name: str, arguments: list[str], role: Templated, **own: str) -> ProcessCommand:
        environment = common | {"RLJOB_COORDINATOR": here.coordinator_url, "RLJOB_HOST": HOST} | own
        variables: Mapping[str, str] = {}
        if isinstance(role, Trainer | Rollout):
            variables = role.nccl
            if role.accelerator.kind == "cpu" or name in assigned:  # else the role's template names the GPUs
                environment[VISIBLE] = ",".join(gpu.visible_as for gpu in assigned.get(name, ()))
        return templated(ProcessCommand(name, [sys.executable, *arguments], environment), role.template, variables)

    def listen(name: str) -> str:
        return f"{HOST}:{here.ports[name]}"

    for_pools: dict[str, str] = {}  # of components that ask frozen pools
    if pools := job.spec.frozen_pools:
        addresses = {pool.name: [f"http://{listen(each)}" for each in engine_names(pool)] for pool in pools}
        for_pools = {"RLJOB_POOL_URLS": json.dumps(addresses), "RLJOB_POOL_TOKEN": here.tokens["pool"]}

    def service_component(kind: str, service: Reward | Environment) -> ProcessCommand:
        name = f"{kind}-{service.name}"
        own = {"RLJOB_NAME": service.name, "RLJOB_LISTEN": listen(name), "RLJOB_TOKEN": here.tokens[kind]}
        if kind == "reward":
            own |= for_pools
        if service.local is None:
            return component(name, ["-m", SERVICES[kind]], service, **own)
        return ProcessCommand(
            name, [in_storage(argument, here.storage) for argument in service.local.command], common | own
        )

    def engine(pool: Rollout, name: str) -> ProcessCommand:
        own = {"RLJOB_NAME": pool.name, "RLJOB_TOKEN": here.tokens["pool" if pool.frozen else "agent"]}
        if pool.frozen:
            own["RLJOB_LISTEN"] = listen(name)
        return component(name, ["-m", "rljob.rollout.main"], pool, **own)

    def urls(kind: str, entries: Sequence[Reward | Environment]) -> str:
        return json.dumps({each.name: each.url or f"http://{listen(f'{kind}-{each.name}')}" for each in entries})

    for_environments: dict[str, str] = {}
    if job.spec.environments:
        for_environments = {
            "RLJOB_ENVIRONMENT_TOKEN": here.tokens["environment"],
            "RLJOB_ENVIRONMENT_URLS": urls("environment", job.spec.environments),
        }
    return [
        *(engine(pool, name) for pool in job.spec.rollouts for name in engine_names(pool)),
        component("trainer", _trainer_arguments(job), job.spec.trainer, RLJOB_TOKEN=here.tokens["trainer"]),
        component(
            "coordinator",
            ["-m", "rljob.coordinator.main"],
            job.spec.coordinator,
            RLJOB_LISTEN=listen("coordinator"),
            RLJOB_TOKENS=str(here.storage / "tokens.json"),
        ),
        *(service_component(kind, service) for kind, service in services(job)),
        *(
            component(
                "runner" if i == 0 else f"runner-{i}",
                ["-m", "rljob.runner.main"],
                job.spec.runner,
                RLJOB_TOKEN=here.tokens["runner"],
                RLJOB_REWARD_TOKEN=here.tokens["reward"],
                RLJOB_REWARD_URLS=urls("reward", job.spec.rewards),
                **for_environments,
                **for_pools,
            )
            for i in range(job.spec.runner.replicas.min)
        ),
    ]


def download(job: RLJob, storage: Path) -> ProcessCommand:
    """Return the command that downloads the remote models of a resolved job, with the variables of the trainer. It has
    the name and the log of the initializer, because both are one pod in a cluster."""
    arguments = [sys.executable, "-m", "rljob.trainer.initialize", "--"]
    environment = common_environment(storage) | endpoint_variables(job.spec.downloads)
    return ProcessCommand(INITIALIZER, arguments, main_variables(job.spec.trainer.template) | environment)


def initializer(job: RLJob, storage: Path) -> ProcessCommand:
    """Return the command of a resolved job's initializer. As in a cluster, it also has the variables of the trainer."""
    spec = job.spec.initializer
    assert spec is not None, "the caller checks that the job has an initializer"
    arguments = [in_storage(argument, storage) for argument in spec.command]
    environment = common_environment(storage) | {SEED: str(job.spec.seed)}
    variables = main_variables(job.spec.trainer.template)
    return templated(ProcessCommand(INITIALIZER, arguments, environment), spec.template, variables)


def templated(command: ProcessCommand, template: dict[str, Any] | None, variables: Mapping[str, str]) -> ProcessCommand:
    """Return ``command`` with env, command and args of the main container in the pod template of its role. The
    template's variables override ``variables``; the variables of ``command`` override both."""
    main = main_container(template)
    arguments = [*(main.get("command") or command.arguments), *(main.get("args") or [])]
    environment = {**variables, **main_variables(template), **command.environment}
    return replace(command, arguments=arguments, environment=environment)


def common_environment(storage: Path) -> dict[str, str]:
    """Return the variables of every component and of the initializer."""
    return {"RLJOB_JOB": str(storage / "job.json"), "RLJOB_STORAGE": str(storage)}


def _trainer_arguments(job: RLJob) -> list[str]:
    processes = job.spec.trainer.processes_per_node
    if processes == 1:
        return ["-m", "rljob.trainer.main"]
    return ["-m", "rljob.trainer.launch", str(processes)]
