"""The held-out split: one rule for initializers, runners and tests."""

from __future__ import annotations

import blake3

HELD_OUT_SHARE = 0.1


def is_held_out(text: str, share: float = HELD_OUT_SHARE) -> bool:
    """Return whether a problem belongs to the held-out split: a fraction of all problems, by the hash of the text.

    The text is the question of a reasoning-gym problem, or the prompt of a file's row. Training and warm starts skip
    held-out problems; evaluation uses only held-out problems.

    Args:
        text: text of the problem.
        share: fraction of the problems that is held out, 0 to 1.
    """
    return int.from_bytes(blake3.blake3(text.encode()).digest(8), "little") < share * 2**64
