"""Plans a job's components as commands of this machine, as the renderer plans pods in a cluster. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rljob.api.kubernetes import Accelerator
from rljob.api.models import RLJob
from rljob.api.pod_models import main_container
from rljob.api.resolve import in_storage
from rljob.api.roles import Coordinator, Reward, Rollout, Runner, Trainer
from rljob.local.processes import ProcessCommand
from rljob.protocol.environment import SEED

HOST = "127.0.0.1"
GPU = Path("/dev/nvidiactl")
"""Exists if the machine, or this container, has NVIDIA GPUs."""
INITIALIZER = "initializer"
Templated: TypeAlias = Trainer | Rollout | Reward | Runner | Coordinator


@dataclass(frozen=True)
class LocalContext:
    """Where a job's components run.

    ``storage``: the run directory. ``ports``: a port for each of :func:`servers`. ``tokens``: a token for each role.
    """

    storage: Path
    ports: dict[str, int]
    tokens: dict[str, str]

    @property
    def coordinator_url(self) -> str:
        """Address of the coordinator."""
        return f"http://{HOST}:{self.ports['coordinator']}"


def servers(job: RLJob) -> list[str]:
    """Return the components that listen on a port."""
    return ["coordinator", *(f"reward-{reward.name}" for reward in job.spec.rewards if reward.url is None)]


def components(job: RLJob, here: LocalContext) -> list[ProcessCommand]:
    """Return the commands of a resolved job's components, in the order of their start."""
    common = common_environment(here.storage)

    def component(name: str, arguments: list[str], role: Templated, **own: str) -> ProcessCommand:
        environment = common | {"RLJOB_COORDINATOR": here.coordinator_url, "RLJOB_HOST": HOST} | own
        variables = role.nccl if isinstance(role, Trainer | Rollout) else {}
        return templated(ProcessCommand(name, [sys.executable, *arguments], environment), role.template, variables)

    def listen(name: str) -> str:
        return f"{HOST}:{here.ports[name]}"

    def reward_component(reward: Reward) -> ProcessCommand:
        name = f"reward-{reward.name}"
        own = {"RLJOB_NAME": reward.name, "RLJOB_LISTEN": listen(name), "RLJOB_TOKEN": here.tokens["reward"]}
        if reward.local is None:
            return component(name, ["-m", "rljob.rewards.main"], reward, **own)
        return ProcessCommand(
            name, [in_storage(argument, here.storage) for argument in reward.local.command], common | own
        )

    rewards = job.spec.rewards
    urls = {reward.name: reward.url or f"http://{listen(f'reward-{reward.name}')}" for reward in rewards}
    return [
        *(
            component(
                f"rollout-{pool.name}-{i}",
                ["-m", "rljob.rollout.main"],
                pool,
                RLJOB_NAME=pool.name,
                RLJOB_TOKEN=here.tokens["agent"],
                **_visible_devices(pool.accelerator),
            )
            for pool in job.spec.rollouts
            for i in range(pool.replicas.min)
        ),
        component(
            "trainer",
            _trainer_arguments(job),
            job.spec.trainer,
            RLJOB_TOKEN=here.tokens["trainer"],
            **_visible_devices(job.spec.trainer.accelerator),
        ),
        component(
            "coordinator",
            ["-m", "rljob.coordinator.main"],
            job.spec.coordinator,
            RLJOB_LISTEN=listen("coordinator"),
            RLJOB_TOKENS=str(here.storage / "tokens.json"),
        ),
        *(reward_component(reward) for reward in rewards if reward.url is None),
        *(
            component(
                "runner" if i == 0 else f"runner-{i}",
                ["-m", "rljob.runner.main"],
                job.spec.runner,
                RLJOB_TOKEN=here.tokens["runner"],
                RLJOB_REWARD_TOKEN=here.tokens["reward"],
                RLJOB_REWARD_URLS=json.dumps(urls),
            )
            for i in range(job.spec.runner.replicas.min)
        ),
    ]


def initializer(job: RLJob, storage: Path) -> ProcessCommand:
    """Return the command of a resolved job's initializer. As in a cluster, it also has the variables of the trainer."""
    spec = job.spec.initializer
    assert spec is not None, "the caller checks that the job has an initializer"
    arguments = [in_storage(argument, storage) for argument in spec.command]
    environment = common_environment(storage) | {SEED: str(job.spec.seed)}
    variables = _variables(job.spec.trainer.template)
    return templated(ProcessCommand(INITIALIZER, arguments, environment), spec.template, variables)


def templated(command: ProcessCommand, template: dict[str, Any] | None, variables: Mapping[str, str]) -> ProcessCommand:
    """Return ``command`` with env, command and args of the main container in the pod template of its role. The
    template's variables override ``variables``; the variables of ``command`` override both."""
    main = main_container(template)
    arguments = [*(main.get("command") or command.arguments), *(main.get("args") or [])]
    environment = {**variables, **_variables(template), **command.environment}
    return replace(command, arguments=arguments, environment=environment)


def _variables(template: dict[str, Any] | None) -> dict[str, str]:
    """Return the variables of a template's main container that have values."""
    entries = main_container(template).get("env") or []
    return {entry["name"]: entry["value"] for entry in entries if entry.get("value") is not None}


def common_environment(storage: Path) -> dict[str, str]:
    """Return the variables of every component and of the initializer."""
    return {"RLJOB_JOB": str(storage / "job.json"), "RLJOB_STORAGE": str(storage)}


def _trainer_arguments(job: RLJob) -> list[str]:
    processes = job.spec.trainer.processes_per_node
    if processes == 1:
        return ["-m", "rljob.trainer.main"]
    return ["-m", "rljob.trainer.launch", str(processes)]


def _visible_devices(accelerator: Accelerator) -> dict[str, str]:
    """Return the variables that restrict a component to the accelerator of its role."""
    return {"CUDA_VISIBLE_DEVICES": ""} if accelerator.kind == "cpu" else {}
