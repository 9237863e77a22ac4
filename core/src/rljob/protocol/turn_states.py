"""States of an environment before the turns of a sample. Only their equality within a group counts, so each is a digest
of the text that names it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from blake3 import blake3

DIGEST_BYTES = 8
_DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


def state_digest(name: str) -> str:
    """Return the digest of the text that names a state; lone surrogates count as question marks."""
    return blake3(name.encode(errors="replace")).hexdigest(DIGEST_BYTES)


def check_states(states: Sequence[str], turns: int) -> None:
    """Check the states of a sample.

    Raises:
        ValueError: their number is neither 0 nor that of the turns, or one is neither a digest nor empty.
    """
    if states and len(states) != turns:
        raise ValueError(f"it has states of {len(states)} turns, but {turns} turns")
    for state in states:
        if state and not _DIGEST.fullmatch(state):
            raise ValueError(f"the state {state[:40]!r} of a turn is not a digest")
