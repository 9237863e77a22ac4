"""Which problems are held out: one rule for initializers, runners and tests."""

from __future__ import annotations

import blake3

HELD_OUT_SHARE = 0.1


def is_held_out(question: str) -> bool:
    """Return whether ``question`` belongs to the held-out split (a tenth of all questions, by hash of their text).

    Training and warm starts skip these questions; evaluation takes only these.
    """
    return int.from_bytes(blake3.blake3(question.encode()).digest(8), "little") < HELD_OUT_SHARE * 2**64
