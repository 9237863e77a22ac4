"""Puts a runner together from what the process was told."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass

import aiohttp

from rljob.protocol.environment import PartEnvironment
from rljob.runner.data import ReasoningGymSource
from rljob.runner.driver import Runner
from rljob.runner.loops import LOOPS
from rljob.runner.prompts import PromptBook, Source
from rljob.runner.scoring import RewardClient
from rljob.runner.text import TextCodec
from rljob.runner.trajectory import TaskKit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What can be checked before anything runs."""

    environment: PartEnvironment
    sources: dict[str, Source]
    codec: TextCodec
    reward_urls: dict[str, str]


def prepare(environment: PartEnvironment, reward_urls: dict[str, str]) -> Prepared:
    """Open every task's source, make its first problems and load the tokenizer.

    Raises:
        ValueError: something in the manifest cannot work; the sentence says what.
    """
    spec = environment.job.spec
    for reward in spec.rewards:
        if reward.name not in reward_urls:
            raise ValueError(f"RLJOB_REWARD_URLS: there is no address of reward {reward.name!r}; add it")
    sources: dict[str, Source] = {}
    for i, task in enumerate(spec.tasks):
        source = ReasoningGymSource(task.data.reasoning_gym, spec.seed, f"tasks[{i}].data.reasoningGym")
        source.problem("train", 0)
        if spec.evaluation is not None and task.name in (spec.evaluation.tasks or [task.name]):
            source.problem("heldOut", 0)
        sources[task.name] = source
    policy = next(model for model in spec.models if model.name == "policy")
    return Prepared(environment, sources, TextCodec(environment.path(policy.source)), reward_urls)


async def serve(prepared: Prepared) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        RefusedError: the coordinator refuses this runner for good.
    """
    environment, spec = prepared.environment, prepared.environment.job.spec
    tasks = {task.name: task for task in spec.tasks}
    prompts = PromptBook(prepared.sources, tasks, prepared.codec)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        rewards = {
            reward.name: RewardClient(reward, prepared.reward_urls[reward.name], session) for reward in spec.rewards
        }
        length = min(rollout.max_model_length for rollout in spec.rollouts)
        kits = {task.name: TaskKit(task, LOOPS["single_turn"], rewards[task.reward], length) for task in spec.tasks}
        runner = Runner(environment.coordinator, environment.token, kits, prompts, prepared.codec)
        work = asyncio.create_task(runner.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        log.info("runner of %s serves %s", environment.job.metadata.name, environment.coordinator)
        try:
            await work
        except asyncio.CancelledError:
            log.info("told to stop")
        finally:
            runner.close()
            await asyncio.gather(*(client.close() for client in rewards.values()))
            prompts.close()
