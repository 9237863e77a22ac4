"""Checks of frozen pools: pools of engines that serve a model which is not trained, to rewards and loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rljob.api.engine_registry import ENGINES, serves_models
from rljob.api.rewards import REWARDS
from rljob.api.rewards.kinds.judge import DEFAULT_TOKENS

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec


def frozen_pool_problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each contradiction; the field's path is relative to spec."""
    models = [model.name for model in spec.models]
    for i, pool in enumerate(spec.rollouts):
        if not pool.frozen:
            continue
        if pool.model not in models:
            yield (
                f"rollouts[{i}].model: {pool.model!r} is not defined; there are {', '.join(models)}; name one of them, "
                "or add it to models"
            )
        if pool.purpose != "training":
            yield (
                f"rollouts[{i}].purpose: a pool with another model than policy serves rewards and loops only; remove it"
            )
        if not serves_models(pool.engine):
            able = " or ".join(name for name in ENGINES if serves_models(name))
            yield f"rollouts[{i}].engine: {pool.engine} cannot serve a model to rewards and loops; set {able}"
        if pool.host_network:
            yield (
                f"rollouts[{i}].hostNetwork: the engines of a pool with another model than policy listen for rewards "
                "and loops, and pods of a node would share the port; remove it"
            )
    yield from _rewards(spec)


def _rewards(spec: RLJobSpec) -> Iterator[str]:
    """Check the pools that built-in rewards name."""
    pools = {pool.name: pool for pool in spec.frozen_pools}
    for i, reward in enumerate(spec.rewards):
        named = reward.config.get("pool")
        takes_pool = reward.builtin is not None and "pool" in REWARDS[reward.builtin].options.model_fields
        if not takes_pool or not isinstance(named, str):
            continue
        if named not in pools:
            known = f"there are {', '.join(pools)}" if pools else "there is none"
            yield (
                f"rewards[{i}].config.pool: {named!r} is no pool with a model of its own; {known}; name an entry of "
                "rollouts whose model is not policy"
            )
            continue
        tokens, length = reward.config.get("maxTokens"), pools[named].max_model_length
        if reward.builtin == "reward_model":
            if isinstance(tokens, int) and tokens > length:
                yield (
                    f"rewards[{i}].config.maxTokens: {tokens} exceeds the maxModelLength {length} of pool {named}, "
                    "which refuses longer samples; lower it"
                )
            continue
        tokens = DEFAULT_TOKENS if tokens is None else tokens
        if isinstance(tokens, int) and tokens >= length:
            yield (
                f"rewards[{i}].config.maxTokens: {tokens} leaves no room for a prompt in pool {named}, whose "
                f"maxModelLength is {length}; lower it"
            )
