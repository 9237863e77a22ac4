"""Finds the NVIDIA GPUs that a process may use, without torch.

``nvidia-smi`` lists the GPUs of the machine or the container with their memory. Without it the driver's files list
them. CUDA_VISIBLE_DEVICES selects from the list as CUDA does. The command line, the trainer's check and the adapter of
vLLM use this module; everything except :func:`installed_gpus` and its callers is pure.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob.api.gpu_names import UUID_PREFIXES, VISIBLE, entries

log = logging.getLogger(__name__)

ORDER = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"
"""Value of :data:`ORDER` with which CUDA numbers GPUs as nvidia-smi does."""
QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
QUERY_SECONDS = 30.0
"""Without persistence mode nvidia-smi initializes the driver first, which takes seconds."""
DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    ``visible_as``: its entry in CUDA_VISIBLE_DEVICES: index or UUID. ``index``: number of the GPU by nvidia-smi; -1 if
    unknown. ``memory_bytes``: total memory; 0 if unknown.
    """

    visible_as: str
    index: int = -1
    uuid: str = ""
    memory_bytes: int = 0
    name: str = ""

    @property
    def key(self) -> int | str:
        """The same for all names of a GPU."""
        return self.index if self.index >= 0 else self.visible_as  # a MIG device has no index


def find_gpus(environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process with these variables may use, in CUDA's order. Default: this process."""
    value = (os.environ if environment is None else environment).get(VISIBLE)
    return () if value is not None and not value.strip() else visible(installed_gpus(), value)


def visible(installed: Sequence[Gpu], value: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order.

    As in CUDA, the list ends before the first entry that names no GPU, or a GPU again. An entry is an index, or a UUID
    that may be abbreviated. A MIG device is known by its UUID only.

    Args:
        installed: all GPUs, by index.
        value: the variable; None: it is not set, and all GPUs are visible.
    """
    if value is None:
        return tuple(installed)
    found: list[Gpu] = []
    for entry in map(str.strip, value.split(",")):
        named = [gpu for gpu in installed if _names(entry, gpu)]
        if entry.startswith("MIG-") and installed:
            found.append(Gpu(entry))
        elif len(named) == 1 and named[0].index not in {gpu.index for gpu in found}:
            found.append(Gpu(entry, named[0].index, named[0].uuid, named[0].memory_bytes, named[0].name))
        else:
            break
    return tuple(found)


def selection_problem(installed: Sequence[Gpu], value: str) -> str:
    """Return which entry of CUDA_VISIBLE_DEVICES names no GPU, or one again; empty if there is none.

    A MIG device passes. So does a UUID if the UUID of a GPU is not known.

    Args:
        installed: GPUs that may be named.
        value: the variable.
    """
    found: set[int | str] = set()
    for entry in entries(value):
        named = [gpu for gpu in installed if _names(entry, gpu) or entry == gpu.visible_as]
        uncertain = entry.startswith("GPU-") and not all(gpu.uuid for gpu in installed)
        if len(named) > 1:
            return f"{entry!r}, which is the beginning of several UUIDs"
        if not named and not uncertain and not entry.startswith("MIG-"):
            return f"{entry!r}, which is none of the GPUs {', '.join(gpu.visible_as for gpu in installed)}"
        key = named[0].key if named else entry
        if key in found:
            return f"{entry!r}, a GPU that it names before"
        found.add(key)
    return ""


def nothing_selected(environment: Mapping[str, str] | None = None) -> str:
    """Return a sentence if CUDA_VISIBLE_DEVICES selects none of the GPUs that exist; empty if it is empty or -1, with
    which GPUs are hidden on purpose."""
    value = (os.environ if environment is None else environment).get(VISIBLE, "").strip()
    if value in ("", "-1") or not (installed := installed_gpus()) or visible(installed, value):
        return ""
    return f"{VISIBLE}={value!r} selects none of the {len(installed)} GPUs of this machine, so none is used"


def _names(entry: str, gpu: Gpu) -> bool:
    if entry.startswith(UUID_PREFIXES):
        return gpu.uuid.startswith(entry)
    return entry.isascii() and entry.isdecimal() and int(entry) == gpu.index


def installed_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of this machine or container."""
    try:
        done = subprocess.run(
            QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        )
        return parse_query(done.stdout)
    except FileNotFoundError:  # no driver, or a container that has only the devices
        pass
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("nvidia-smi cannot list the GPUs (%s); their memory is unknown", error)
    return from_files(DRIVER, DEVICES)


def parse_query(output: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of nvidia-smi with :data:`QUERY`.

    Raises:
        ValueError: the output has another form, for example an error message.
    """
    gpus = []
    for line in filter(None, map(str.strip, output.splitlines())):
        index, uuid, memory, name = (cell.strip() for cell in line.split(",", 3))
        size = int(memory) * _MEBIBYTE if memory.isdecimal() else 0  # [N/A] where CPU and GPU share the memory
        gpus.append(Gpu(index, int(index), uuid, size, name))
    return tuple(gpus)


def from_files(driver: Path, devices: Path) -> tuple[Gpu, ...]:
    """Return the GPUs with a device node that the driver's files describe; without these, one GPU per device node.

    Args:
        driver: directory with a directory per GPU, named by its PCI address: the order of nvidia-smi.
        devices: directory of the device nodes. A container has only those of its own GPUs.
    """
    nodes = sorted(int(path.name.removeprefix("nvidia")) for path in devices.glob("nvidia[0-9]*"))
    gpus: list[Gpu] = []
    for path in sorted(driver.glob("*/information")):
        try:
            lines = [line.partition(":") for line in path.read_text().splitlines()]
        except OSError:  # the GPU was removed
            continue
        values = {key.strip(): value.strip() for key, _, value in lines}
        if values.get("Device Minor", "").isdecimal() and int(values["Device Minor"]) in nodes:
            uuid = values.get("GPU UUID", "")
            known = uuid if re.fullmatch(r"GPU-[0-9a-f-]+", uuid) else ""  # question marks before the first use
            gpus.append(Gpu(str(len(gpus)), len(gpus), known, 0, values.get("Model", "")))
    return tuple(gpus) or tuple(Gpu(str(i), i) for i in range(len(nodes)))
