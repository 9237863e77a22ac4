"""Log-probabilities of a finished sample under the models of frozen pools: a reference or a teacher."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping

from rljob.protocol.branches import TurnKey
from rljob.protocol.model_logprobs import sequences_of
from rljob.protocol.runner_protocol import TurnTokens
from rljob.runner.pools.leased_questions import FrozenPool, PoolRuntime

INT32 = 4


async def sample_logprobs(turns: Mapping[TurnKey, TurnTokens], pools: PoolRuntime) -> dict[str, bytes]:
    """Return role → float32 of each of the model's tokens, in the order of the sequences; all pools are asked at once.

    Args:
        turns: of the sample.
        pools: of the job.

    Raises:
        TrajectoryError: a pool gives no answer.
    """
    found = await asyncio.gather(*(_of_pool(turns, pools.frozen[name]) for name in pools.roles.values()))
    return dict(zip(pools.roles, found, strict=True))


async def _of_pool(turns: Mapping[TurnKey, TurnTokens], pool: FrozenPool) -> bytes:
    sequences = sequences_of(turns)
    tokens = [b"".join(turns[key].given + turns[key].token_ids for key, _ in keys) for keys in sequences]
    answers = await asyncio.gather(*(pool.logprobs(each) for each in tokens))
    chosen = array("f")
    for keys, logprobs in zip(sequences, answers, strict=True):
        at = 0
        for key, is_new in keys:
            begin = at + len(turns[key].given) // INT32
            at = begin + len(turns[key].token_ids) // INT32
            if is_new:
                chosen.extend(logprobs[begin:at])
    return chosen.tobytes()
