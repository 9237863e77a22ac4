"""The channel between the tests and the program, which are two processes: requests and answers as plain data.

:mod:`rljob.rewards.sandbox.program_peer` is the program's end, :mod:`rljob.rewards.sandbox.remote_objects` the tests'.
"""

from __future__ import annotations

import abc
import builtins
import json
import os
import struct
from _thread import RLock
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljob.rewards.sandbox.plain_data import decode, encode

MAX_MESSAGE = 64 << 20
ARGUMENT = "argument"
"""Tag of an argument or result of a call that is the argument at a place."""
TEXT = "_text"
"""Attribute of an exception of a class of the program."""
PROGRAM = 0
"""Number of the module of the program."""


def is_argument(code: Any) -> bool:
    """Return whether a code stands for an argument of its call."""
    return isinstance(code, list) and code[0] == ARGUMENT


class RemoteError(Exception):
    """An exception of the program that has no counterpart in the tests."""


def applied(function: Callable[..., Any], values: Sequence[Any], names: Sequence[str]) -> Any:
    """Call a function with positional arguments, and with those of ``names`` at the end of ``values``."""
    positional = len(values) - len(names)
    return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


class ChannelPeer(abc.ABC):
    """One end of the channel. Each side answers requests of the other one while it waits for an answer of its own."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._objects: list[Any] = []
        self._asking = RLock()  # not of threading, whose import slows every fork of the zygote
        self._exceptions: dict[str, type[BaseException]] = {}

    def _reference(self, value: Any) -> list[Any]:
        for number, known in enumerate(self._objects):
            if known is value:
                return ["o", number]
        self._objects.append(value)
        return ["o", len(self._objects) - 1]

    def _ask(self, operation: str, *arguments: Any) -> Any:
        """Send a request and return the answer, an encoded value. Other threads wait.

        Raises:
            EOFError: the other process has ended.
            Exception: that the other side raised.
        """
        with self._asking:
            self._send({"do": operation, "with": arguments})
            while "do" in (message := self._receive()):
                self._answer(message)
        if "raised" in message:
            raise self._exception(*message["raised"])
        return message["answer"]

    def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            answer = {"answer": self._do(message["do"], *message["with"])}
        except BaseException as error:  # noqa: BLE001 the other side gets it
            answer = {"raised": self._described(error)}
        self._send(answer)

    @abc.abstractmethod
    def _do(self, operation: str, *arguments: Any) -> Any:
        """Return the answer to a message. Each of the two sides has its own operations."""

    def _described(self, error: BaseException) -> list[Any]:
        """Return the names of its classes, the most special first, its arguments, its attributes and its text."""
        try:
            values = [self._encode(value) for value in error.args]
            attributes = {str(name): self._encode(value) for name, value in vars(error).items()}
            text = str(error)
        except Exception:  # noqa: BLE001 an object of the program that cannot be described
            values, attributes, text = [], {}, ""
        return [[kind.__name__ for kind in type(error).__mro__], values, attributes, text]

    def _exception(self, names: list[str], values: list[Any], attributes: dict[str, Any], text: str) -> BaseException:
        """Return an exception as :meth:`_described` describes it, of the first of the classes that this side has."""
        kinds = (self._exceptions.get(name) or builtin_exception(name) for name in names)
        kind = next((kind for kind in kinds if kind), RemoteError)
        try:
            error = kind(*map(self._decode, values))
        except Exception:  # noqa: BLE001 it takes other arguments
            return RemoteError(str(names[0]))
        vars(error).update({name: self._decode(code) for name, code in attributes.items() if not hasattr(kind, name)})
        if kind in self._exceptions.values():
            vars(error)[TEXT] = str(text)
        return error

    def _encode(self, value: Any) -> Any:
        return encode(value, self._reference)

    def _decode(self, code: Any) -> Any:
        return decode(code, self._resolve)

    @abc.abstractmethod
    def _resolve(self, code: list[Any]) -> Any:
        """Return the value of a reference of the other side."""

    def _send(self, message: Any) -> None:
        try:
            data = json.dumps(message).encode()
        except (ValueError, RecursionError) as error:
            data = json.dumps({"raised": self._described(error)}).encode()
        view = memoryview(struct.pack("!I", len(data)) + data)
        while view:
            view = view[os.write(self._channel, view) :]

    def _receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("!I", self._read(4))
        if length > MAX_MESSAGE:
            raise EOFError("the other process sends too much")
        message = json.loads(self._read(length))
        if not isinstance(message, dict):
            raise EOFError("the other process sends something else")
        return message

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = os.read(self._channel, min(length, 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def builtin_exception(name: str) -> type[BaseException] | None:
    """Return Python's own exception of this name; None if there is none that may cross."""
    found = getattr(builtins, str(name), None)
    usable = isinstance(found, type) and issubclass(found, (Exception, SystemExit))
    return found if usable else None
