"""Builds a runner from its prepared parts and serves the coordinator until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

from rljob.api.algorithm_presets import model_pools
from rljob.api.tasks import Task
from rljob.protocol.coordinator_link import CoordinatorLink
from rljob.protocol.health_probe import HEARTBEAT, record_ready
from rljob.protocol.heartbeat import beating
from rljob.protocol.runner_protocol import ToRunner
from rljob.runner.agents.agent_endpoint import AgentEndpoint
from rljob.runner.agents.leased_agent import AgentRuntime
from rljob.runner.conversation import Conversation
from rljob.runner.driver import RunnerDriver
from rljob.runner.environment_client import EnvironmentClient
from rljob.runner.group_filter import FilterFunction
from rljob.runner.leased_episode import EnvironmentRuntime
from rljob.runner.leased_trajectory import TaskRuntime
from rljob.runner.pools.leased_questions import PoolRuntime
from rljob.runner.pools.pool_client import PoolClient
from rljob.runner.process_record import recording
from rljob.runner.prompts import PromptCache
from rljob.runner.reward_routing import scorer_of
from rljob.runner.scoring import RewardClient
from rljob.runner.service_http import service_session
from rljob.runner.setup import Prepared, model_length

log = logging.getLogger(__name__)


async def serve(
    prepared: Prepared,
    reward_urls: dict[str, str],
    reward_token: str = "",
    environment_urls: Mapping[str, str] = MappingProxyType({}),
    environment_token: str = "",
    pool_urls: Mapping[str, Sequence[str]] = MappingProxyType({}),
    pool_token: str = "",
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        prepared: data, tokenizer, prompts and loops.
        reward_urls: reward → address of its service.
        reward_token: token of the rewards that rljob starts; rewards with a ``url`` do not get it.
        environment_urls: environment → address of its service.
        environment_token: as for rewards.
        pool_urls: frozen pool → addresses of its engines.
        pool_token: token of these engines.

    Raises:
        RefusedError: the coordinator rejects this runner permanently.
        ValueError: a reward, an environment or a frozen pool has no address.
    """
    environment, spec = prepared.environment, prepared.environment.job.spec
    _check_addresses("RLJOB_REWARD_URLS: reward", [reward.name for reward in spec.rewards], reward_urls)
    _check_addresses("RLJOB_ENVIRONMENT_URLS: environment", [e.name for e in spec.environments], environment_urls)
    _check_addresses("RLJOB_POOL_URLS: pool", [pool.name for pool in spec.frozen_pools], pool_urls)
    prompts = PromptCache(prepared.sources, prepared.maker, spec.failure_policy.stall_seconds)
    late_seconds = spec.failure_policy.hang_seconds / 2  # well before the process is killed
    async with (
        service_session() as session,
        _agent_endpoint(prepared) as endpoint,
        recording(os.environ.get(HEARTBEAT), late_seconds) as record,
    ):
        rewards = {
            reward.name: RewardClient(reward, reward_urls[reward.name], session, "" if reward.url else reward_token)
            for reward in spec.rewards
        }
        environments = {
            entry.name: EnvironmentClient(
                entry, environment_urls[entry.name], session, "" if entry.url else environment_token
            )
            for entry in spec.environments
        }
        stall_seconds = spec.failure_policy.stall_seconds
        pools = {
            pool.name: PoolClient(pool, pool_urls[pool.name], session, pool_token, stall_seconds)
            for pool in spec.frozen_pools
        }
        held_out = {name: source.size("heldOut") for name, source in prepared.sources.items()}
        runner = RunnerDriver(
            f"runner-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            lambda register: CoordinatorLink(environment.coordinator, "runner", environment.token, ToRunner, register),
            _task_runtimes(prepared, rewards, environments, endpoint, pools),
            prompts,
            prepared.codec,
            {name: size for name, size in held_out.items() if size is not None},
            _group_filters(prepared),
            record=record,
        )
        reachable = [
            asyncio.create_task(rewards[reward.name].wait_until_reachable()) for reward in spec.rewards if reward.url
        ]
        log.info("runner of %s serves %s", environment.job.metadata.name, environment.coordinator)
        try:
            await _run_until_signal(runner)
        finally:
            runner.close()
            for task in reachable:
                task.cancel()
            await asyncio.gather(*(client.close() for client in rewards.values()))
            await asyncio.gather(*(client.close() for client in environments.values()))
            await asyncio.gather(*(client.close() for client in pools.values()))
            prompts.close()


def _check_addresses(what: str, names: Iterable[str], urls: Mapping[str, object]) -> None:
    for name in names:
        if name not in urls:
            raise ValueError(f"{what} {name!r} has no address; add one")


async def _run_until_signal(runner: RunnerDriver) -> None:
    work = asyncio.create_task(runner.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    record_ready(True)
    try:
        with beating():
            await work
    except asyncio.CancelledError:
        log.info("stopping: received a signal")
    finally:
        record_ready(False)


@asynccontextmanager
async def _agent_endpoint(prepared: Prepared) -> AsyncIterator[AgentEndpoint | None]:
    """Serve the endpoint for agents, if a task has one."""
    if not prepared.agents:
        yield None
        return
    async with AgentEndpoint().serving() as endpoint:
        log.info("agents call the model at %s", endpoint.url)
        yield endpoint


def _task_runtimes(
    prepared: Prepared,
    rewards: Mapping[str, RewardClient],
    environments: Mapping[str, EnvironmentClient],
    endpoint: AgentEndpoint | None,
    pools: Mapping[str, PoolClient],
) -> dict[str, TaskRuntime]:
    spec = prepared.environment.job.spec
    of_policy = [pool.name for pool in spec.policy_pools]
    length = model_length(spec)
    evaluated_at = spec.evaluation.temperature if spec.evaluation is not None else None
    return {
        task.name: TaskRuntime(
            task,
            prepared.loops[task.name],
            scorer_of(task, rewards),
            length,
            task.sampling.temperature if evaluated_at is None else evaluated_at,
            spec.failure_policy.stall_seconds,
            _environment_runtime(prepared, task, environments),
            _agent_runtime(prepared, task, endpoint),
            PoolRuntime(pools, of_policy, spec.seed, model_pools(spec.algorithm, task.name)),
        )
        for task in spec.tasks
    }


def _group_filters(prepared: Prepared) -> dict[str, FilterFunction]:
    spec = prepared.environment.job.spec
    return {
        task.name: FilterFunction(
            task.name, task.group_filter.function, prepared.filters[task.name], spec.failure_policy.stall_seconds
        )
        for task in spec.tasks
        if task.group_filter.function is not None
    }


def _environment_runtime(
    prepared: Prepared, task: Task, clients: Mapping[str, EnvironmentClient]
) -> EnvironmentRuntime | None:
    if task.environment is None:
        return None
    codec, maker = prepared.codec, prepared.maker
    return EnvironmentRuntime(
        task.environment,
        task.sampling.max_tokens,
        clients[task.environment.name],
        Conversation(task, codec, maker.chat, codec.stop_token_ids),
        maker,
        prepared.environment.job.spec.seed,
    )


def _agent_runtime(prepared: Prepared, task: Task, endpoint: AgentEndpoint | None) -> AgentRuntime | None:
    if task.agent is None:
        return None
    spec, codec, chat = prepared.environment.job.spec, prepared.codec, prepared.maker.chat
    assert endpoint is not None and chat is not None, "a job with an agent has an endpoint and a chat template"
    return AgentRuntime(
        prepared.agents[task.name],
        endpoint,
        chat,
        codec,
        codec.stop_token_ids,
        model_length(spec),
        task.scored,
        spec.seed,
    )
