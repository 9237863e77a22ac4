"""Integer keys of groups and samples in the ledger. The ids that users see are derived from them.

A training group ``gSEQ`` has the number SEQ. A group ``eVERSION.SEQ`` of an evaluation has a negative number, lower for
later versions. The members of a group have adjacent numbers. schema.sql derives the ids by the same rules.
"""

from __future__ import annotations

from functools import lru_cache

MEMBER_BITS = 12
"""A group has at most 2,049 members: samplesPerPrompt, redundancy.members and a greedy answer."""
MEMBERS = 1 << MEMBER_BITS
RECENT_SAMPLES = 1 << 15
"""Samples whose numbers are kept: each is needed several times between admission and training."""
EVALUATION_BITS = 28
"""Groups of one evaluation: problems of all its tasks."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1  # of SQLite's integers


def group_number(group: str) -> int:
    """Return the number of the group with an id; ValueError: it is not the id of a group."""
    if group.startswith("g"):
        return int(group[1:])
    version, _, seq = group.removeprefix("e").partition(".")
    if not group.startswith("e") or not 0 <= int(seq) < 1 << EVALUATION_BITS:
        raise ValueError(f"{group!r} is not the id of a group")
    return -1 - (int(version) << EVALUATION_BITS | int(seq))


@lru_cache(RECENT_SAMPLES)
def sample_number(sample: str) -> int:
    """Return the number of the sample with an id; ValueError: it is not the id of a sample."""
    group, _, member = sample.rpartition(".")
    if not 0 <= int(member) < MEMBERS:
        raise ValueError(f"{sample!r} is not the id of a sample")
    return group_number(group) << MEMBER_BITS | int(member)


def group_id(number: int) -> str:
    """Return the id of a group."""
    if number >= 0:
        return f"g{number}"
    version, seq = divmod(-1 - number, 1 << EVALUATION_BITS)
    return f"e{version}.{seq}"


def sample_id(number: int) -> str:
    """Return the id of a sample."""
    return f"{group_id(number >> MEMBER_BITS)}.{number & (MEMBERS - 1)}"


def evaluation_numbers(version: int) -> tuple[int, int]:
    """Return the lowest and the highest number of the groups of the evaluation of ``version``."""
    return -(version + 1 << EVALUATION_BITS), -1 - (version << EVALUATION_BITS)


def find_number(sample: str) -> int | None:
    """Return the number of a sample with an id in its only form; None: no sample has this id."""
    try:
        number = sample_number(sample)
    except ValueError:
        return None
    return number if sample_id(number) == sample and _LEAST <= number <= _MOST else None
