"""Names of a checkpoint's files, and the headers of its weights.

The trainer writes STORAGE/checkpoints/step-NNNNNN: a Hugging Face directory with the optimizer's state beside it. It
writes under a temporary name and then renames, so a directory with the final name was complete; without
:data:`STATE_FILE` it is damaged. Tensors of several ranks are in several files with an index, named as
``save_pretrained`` of transformers names them (:func:`part_name`, :func:`index_name`). The trainer, the command line
and the audit use this module.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

DIRECTORY = "checkpoints"
"""Directory of all checkpoints in the job's storage."""
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_PATTERN = "*.safetensors"
_SUFFIX = ".safetensors"
OPTIMIZER_FILE = "trainer/optimizer.safetensors"
"""It is in a subdirectory, because engines load every *.safetensors of a model's directory as weights."""
STATE_FILE = "trainer.json"

MAX_HEADER_BYTES = 100_000_000
_NAME = re.compile(r"step-(\d{6,})")
_LENGTH_BYTES = 8


def part_name(file: str, number: int, parts: int) -> str:
    """Return the name of part ``number`` (from 1) of a file: model-00001-of-00002.safetensors; one part has the name of
    the file."""
    stem = file.removesuffix(_SUFFIX)
    return file if parts == 1 else f"{stem}-{number:05d}-of-{parts:05d}{_SUFFIX}"


def index_name(file: str) -> str:
    """Return the name of the JSON file that says which part of a file has which tensor; absent if there is one part."""
    return f"{file}.index.json"


def directory_name(step: int) -> str:
    """Return the name of the checkpoint directory of a step, for example step-000020."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint directory; None for other names, for example that of a temporary directory."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_inside(path: str) -> bool:
    """Return whether a path that another process wrote or reported is relative and stays inside its directory."""
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts


def is_complete(checkpoint: Path) -> bool:
    """Return whether a directory with a final name contains a complete checkpoint."""
    return (checkpoint / STATE_FILE).is_file()


def checkpoint_directories(checkpoints: Path) -> dict[int, Path]:
    """Return step → path of the directories with a final name in a directory, which need not exist."""
    steps = {step_of(path.name): path for path in checkpoints.glob("step-*") if path.is_dir()}
    return {step: path for step, path in steps.items() if step is not None}


def read_header(path: Path) -> dict[str, Any]:
    """Return tensor name → dtype, shape and offsets, from the header of a safetensors file.

    The file consists of the length of a JSON header (eight bytes, little-endian), the header, and the tensors' bytes
    (https://huggingface.co/docs/safetensors).

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not begin with a header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(min(MAX_HEADER_BYTES, length)))
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    header.pop("__metadata__", None)
    return header
