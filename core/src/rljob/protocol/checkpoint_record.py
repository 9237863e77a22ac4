"""The record of a checkpoint, trainer.json: what the checkpoint is, and the digest of every other file in it.

Digests are blake3 of the files' bytes. They are computed while the files are written. :func:`find_damage` computes them
again: the trainer before it loads a checkpoint, `rljob audit` and `rljob export`. That costs one pass over the files:
0.5 s per GB for files in the page cache, of which 0.25 s is blake3 (measured on one core of a Xeon); otherwise the disk
is the limit. A checkpoint has 12 bytes per parameter.

The record has a digest of its own, which the ledger keeps, so that a checkpoint of another run or of another lineage is
noticed: the coordinator compares the two when a trainer starts, the others before they use the files.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import blake3
import msgspec

from rljob.protocol.checkpoint_files import STATE_FILE, is_inside

CHUNK_BYTES = 4 << 20
OTHER_RECORD = f"{STATE_FILE} does not have the digest in the ledger"


class TrainerState(msgspec.Struct):
    """Content of trainer.json."""

    step: int  # training steps applied: the policy version
    updates: int  # optimizer updates: steps × minibatches
    incarnation: int  # of the trainer that wrote it
    versions: dict[str, str]
    files: dict[str, str]  # path in the checkpoint → blake3 hex, of all other files
    digest: str = ""  # blake3 hex of this record with an empty digest


def encode_state(state: TrainerState) -> bytes:
    """Set ``state.digest`` and return the content of trainer.json."""
    state.digest = _own_digest(state)
    return msgspec.json.format(msgspec.json.encode(state))


def read_state_file(checkpoint: Path) -> TrainerState:
    """Return the content of trainer.json of a checkpoint.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = checkpoint / STATE_FILE
    try:
        with _open(path) as file:
            return decode_state(file.read())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from None


def decode_state(content: bytes) -> TrainerState:
    """Return the state from the content of trainer.json.

    Raises:
        ValueError: the content is damaged.
    """
    try:
        state = msgspec.json.decode(content, type=TrainerState)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if state.digest != _own_digest(state):
        raise ValueError("it does not have its own digest")
    return state


def model_files(state: TrainerState) -> dict[str, str]:
    """Return name → digest of the files of the checkpoint's model; the others are the trainer's."""
    return {name: digest for name, digest in state.files.items() if "/" not in name}


def find_damage(directory: Path, files: Mapping[str, str]) -> str:
    """Return the first of ``files`` (path in the directory → digest) that is missing or differs, and how; empty if all
    are as written."""
    for name, digest in files.items():
        if not is_inside(name):
            return f"{STATE_FILE} is damaged (it names {name!r}, which is not in the checkpoint)"
        try:
            found = hash_file(directory / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != digest:
            return f"{name} is damaged (it does not have the digest in {STATE_FILE})"
    return ""


def find_unrecorded(directory: Path, files: Collection[str]) -> str:
    """Return the first file beside ``files`` (paths in the directory) that a reader might take for one of them, such as
    an index, and what to do; empty if there is none. Hidden files do not count: NFS makes them."""
    for folder in sorted({(directory / name).parent for name in files}):
        try:
            found = sorted(folder.iterdir())
        except OSError as error:
            return f"{folder.relative_to(directory).as_posix()} cannot be read ({error.strerror})"
        for path in found:
            name = path.relative_to(directory).as_posix()
            if not path.is_dir() and name not in files and name != STATE_FILE and not path.name.startswith("."):
                return f"{name} is not in {STATE_FILE}: remove it"
    return ""


def hash_file(path: Path) -> str:
    """Return the digest of a file.

    The file is read, not mapped: a read error of the disk is an OSError, where a mapped file would kill the process.

    Raises:
        OSError: the file cannot be read.
    """
    digest, buffer = blake3.blake3(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with _open(path) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _open(path: Path) -> io.FileIO:
    """Open a regular file for reading, without buffer; a pipe or a device might never end.

    Raises:
        OSError: the file cannot be read, or is another one.
    """
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def _own_digest(state: TrainerState) -> str:
    return blake3.blake3(msgspec.json.encode(msgspec.structs.replace(state, digest=""))).hexdigest()
