"""Environments of tests: one whose faults depend on the row."""

from __future__ import annotations

import asyncio
from typing import Any

FAULTS = {
    0: "step raised RuntimeError: broken",
    1: "step took more than 0.2 s and was cancelled",
    2: "returned the reward nan",
    3: "returned an observation of 10,000,000 characters",
    4: "step must return",
}
PERIOD = 23


class FaultyCounter:
    """Counts the letters of the answers for three steps; rewards odd numbers. Some rows fail at the second step."""

    async def reset(self, seed: int, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Start."""
        self.fault = row["seed"] // 2 % PERIOD
        self.letters, self.steps = seed % 5, 0
        return f"start {row['seed'] % 1000} {self.letters}", {}

    async def step(self, action: str) -> Any:
        """Count."""
        self.steps += 1
        self.letters += len(action)
        reward, text = float(self.letters % 2), f"counted {self.letters}"
        if self.steps == 2:
            match self.fault:
                case 0:
                    raise RuntimeError("broken")
                case 1:
                    await asyncio.sleep(3600)
                case 2:
                    reward = float("nan")
                case 3:
                    text = "x" * 10_000_000
                case 4:
                    return text
        return text, reward, self.steps == 3, False, {"metrics": {"letters": self.letters}}
