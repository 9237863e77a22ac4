"""A job as the commands of its parts: what a renderer makes pods of in a cluster. Pure."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rljob.api.models import RLJob
from rljob.local.processes import Command

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Surroundings:
    """Where a job's parts are to run.

    ``storage`` is the run directory, ``ports`` has a port for each of :func:`servers`, ``tokens`` one for each role.
    """

    storage: Path
    ports: dict[str, int]
    tokens: dict[str, str]

    @property
    def coordinator_url(self) -> str:
        """Address of the coordinator."""
        return f"http://{HOST}:{self.ports['coordinator']}"


def servers(job: RLJob) -> list[str]:
    """Return the parts that listen on a port."""
    return ["coordinator", *(f"reward-{reward.name}" for reward in job.spec.rewards)]


def parts(job: RLJob, here: Surroundings) -> list[Command]:
    """Return the parts of a resolved job as commands, in the order in which they are started."""
    common = common_environment(here.storage)

    def part(name: str, arguments: list[str], **own: str) -> Command:
        environment = common | {"RLJOB_COORDINATOR": here.coordinator_url, "RLJOB_HOST": HOST}
        return Command(name, [sys.executable, *arguments], environment | own)

    def listen(name: str) -> str:
        return f"{HOST}:{here.ports[name]}"

    rewards = [f"reward-{reward.name}" for reward in job.spec.rewards]
    urls = {name.removeprefix("reward-"): f"http://{listen(name)}" for name in rewards}
    return [
        *(
            part(
                f"rollout-{pool.name}-{i}",
                ["-m", "rljob.rollout.main"],
                RLJOB_NAME=pool.name,
                RLJOB_TOKEN=here.tokens["agent"],
            )
            for pool in job.spec.rollouts
            for i in range(pool.replicas.min)
        ),
        part("trainer", _trainer_arguments(job), RLJOB_TOKEN=here.tokens["trainer"]),
        part(
            "coordinator",
            ["-m", "rljob.coordinator.main"],
            RLJOB_LISTEN=listen("coordinator"),
            RLJOB_TOKENS=str(here.storage / "tokens.json"),
        ),
        *(
            part(
                name,
                ["-m", "rljob.rewards.main"],
                RLJOB_NAME=name.removeprefix("reward-"),
                RLJOB_LISTEN=listen(name),
            )
            for name in rewards
        ),
        part(
            "runner",
            ["-m", "rljob.runner.main"],
            RLJOB_TOKEN=here.tokens["runner"],
            RLJOB_REWARD_URLS=json.dumps(urls),
        ),
    ]


def common_environment(storage: Path) -> dict[str, str]:
    """Return the variables that every part and the initializer get."""
    return {"RLJOB_JOB": str(storage / "job.json"), "RLJOB_STORAGE": str(storage)}


def in_storage(text: str, storage: Path) -> str:
    """Return ``text`` with job://PATH replaced by PATH in ``storage``."""
    return text.replace("job://", f"{storage}/")


def _trainer_arguments(job: RLJob) -> list[str]:
    processes = job.spec.trainer.processes_per_node
    if processes == 1:
        return ["-m", "rljob.trainer.main"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=0"]
    return [*launcher, "-m", "rljob.trainer.main"]
