"""The task of the runs with the real engine and trainer."""

from __future__ import annotations

from typing import Any

from rljob.api.resolve import DEFAULT_PROMPT

SUMS: dict[str, Any] = {
    "name": "sums",
    "data": {"reasoningGym": {"dataset": "chain_sum", "config": {"max_terms": 3, "max_digits": 1}}},
    "prompt": DEFAULT_PROMPT,
    "reward": "sums",
    "sampling": {"maxTokens": 32},
}
