"""All attacks, by name."""

from __future__ import annotations

from e2e.sandbox.attacks_on_files import DISK, KERNEL, NETWORK, VIEW
from e2e.sandbox.attacks_on_processes import MEMORY, PROCESSES, TIME

ATTACKS = {attack.name: attack for attack in (*PROCESSES, *MEMORY, *DISK, *VIEW, *NETWORK, *KERNEL, *TIME)}
