"""Log-probabilities of a sample under models of frozen pools: which tokens have one, in which order."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping

from rljob.protocol.branches import TurnKey, last_turns, path

FLOAT32 = 4


def sequences_of(turns: Collection[TurnKey]) -> list[list[tuple[TurnKey, bool]]]:
    """Return the turns of each sequence of a sample, in order, each with whether its tokens are in the loss mask: those
    that an earlier sequence has are not.

    Args:
        turns: of the sample.
    """
    last: dict[str, int] = {}
    for turn, branch in turns:
        last[branch] = max(turn, last.get(branch, 0))
    found: list[list[tuple[TurnKey, bool]]] = []
    known: set[TurnKey] = set()
    for end in last_turns((turn, branch) for branch, turn in last.items()):
        keys = path(end)
        found.append([(key, key not in known) for key in keys])
        known.update(keys)
    return found


def check_logprobs(logprobs: Mapping[str, bytes], roles: Collection[str], tokens: int) -> None:
    """Check the log-probabilities of a sample.

    Args:
        logprobs: role → float32 of each of the model's tokens.
        roles: of models of frozen pools, for its task.
        tokens: that the model wrote.

    Raises:
        ValueError: a role is missing or unknown, or has not one finite number for each token.
    """
    if logprobs.keys() != set(roles):
        raise ValueError(f"it has log-probabilities of {sorted(logprobs)}, and the job needs those of {sorted(roles)}")
    for role, values in logprobs.items():
        if len(values) != FLOAT32 * tokens or not all(map(math.isfinite, array("f", values))):
            raise ValueError(f"its log-probabilities of the model {role} are not one finite number for each token")
