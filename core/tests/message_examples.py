"""One example of every message, and the file with all of them as they are on the wire.

Processes of one run may be of two releases, so what is on the wire changes only on purpose. After such a change, update
the file and read the difference (a new field is the last one of its message, and has a default):

    python -m core.tests.message_examples --update
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from rljob.protocol import agent_protocol, runner_protocol, trainer_protocol
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.frames import encode_frame

STORED = Path(__file__).parent / "stored/messages.txt"
PROTOCOLS = (agent_protocol, runner_protocol, trainer_protocol)
UNIONS = {
    name: value for module in PROTOCOLS for name, value in vars(module).items() if name.startswith(("From", "To"))
}


def example(kind: Any, name: str = "text") -> Any:
    """Return a value of a type, by its annotations. ``name`` is the field's: fields of a type have different values."""
    origin = typing.get_origin(kind)
    if origin is list:
        return [example(typing.get_args(kind)[0], name)] * 2
    if origin is dict:
        return {"name": example(typing.get_args(kind)[1], name)}
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    if origin is types.UnionType:  # a value or None
        return example(typing.get_args(kind)[0], name)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(example(hint, field) for field, hint in typing.get_type_hints(kind).items()))
    number = sum(name.encode()) % 100
    return {str: name, int: number, float: number + 0.5, bool: True, bytes: name.encode()}[kind]


def text() -> str:
    """Return a line for each message of each direction, and one for a shard: the value that it decodes to."""
    sent = [(name, kind) for name, union in UNIONS.items() for kind in typing.get_args(union)]
    lines = []
    for name, kind in [*sent, ("Shard", SampleTokens)]:
        (fields,) = msgspec.msgpack.decode(encode_frame([example(kind)]))
        lines.append(f"{name} {fields!r}\n")
    return "".join(sorted(lines))


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    STORED.write_text(text())
