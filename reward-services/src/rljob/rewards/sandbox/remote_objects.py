"""The channel between the tests and the program, which are two processes: calls with plain data.

The tests hold a :class:`RemoteObject` for each function, class and object of the program. What the tests ask of it is
done in the program's process. A remote object is never equal to plain data, has no order and no arithmetic, because the
program would decide these, and a wrong answer could call itself right. Of the tests, the program can only call
functions that they passed as arguments.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import struct
import sys
import types
from _thread import RLock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rljob.rewards.sandbox.plain_data import decode, encode, replace_contents

MAX_MESSAGE = 64 << 20
STOPPED = "StopIteration"
"""What a RemoteError says in place of a StopIteration of the program, which would end a loop of the tests, and skip
what they compare."""
ARGUMENT = "argument"
"""Tag of an argument or result of a call that is the argument at a place."""
TEXT = "_text"
"""Attribute of an exception of a class of the program."""
PROGRAM = 0
"""Number of the module of the program."""
PLAIN_MODULES = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json"),
    *("math", "operator", "random", "re", "statistics", "string", "typing"),
)
"""Modules that tests may use although only the program imports them; the tests get the real ones."""


def _is_argument(code: Any) -> bool:
    return isinstance(code, list) and code[0] == ARGUMENT


class RemoteError(Exception):
    """An exception of the program that has no counterpart in the tests."""


class _Peer:
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

    def _do(self, operation: str, *arguments: Any) -> Any:
        """Return the answer to a message. Each of the two sides has its own operations."""
        raise NotImplementedError

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
        kinds = (self._exceptions.get(name) or _builtin_exception(name) for name in names)
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

    def _resolve(self, code: list[Any]) -> Any:
        """Return the value of a reference of the other side."""
        raise NotImplementedError

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


class ProgramPeer(_Peer):
    """The program's end. ``failure``: the exception that ended the program, which every request then gets."""

    failure: BaseException | None = None

    def __init__(self, channel: int, program: types.ModuleType) -> None:
        super().__init__(channel)
        self._objects.append(program)
        self._callbacks: dict[int, _Callback] = {}

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        while True:
            try:
                message = self._receive()
            except EOFError:
                return
            self._answer(message)

    def _do(self, operation: str, *arguments: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        if operation == "names":
            names = list(vars(self._objects[PROGRAM]).items())
            return [[name, self._encode(value)] for name, value in names if not name.startswith("__")]
        if operation == "call":
            return self._call(*arguments)
        values = [self._decode(argument) for argument in arguments]
        return self._encode(OPERATIONS[operation](*values))

    def _call(self, function: Any, codes: list[Any], names: list[str]) -> list[Any]:
        """Call a function with positional arguments, and with those of ``names`` at the end of ``codes``.

        Returns:
            The result, the exception in its place, and the arguments that the call has changed, by place.
        """
        values: list[Any] = []
        for code in codes:
            values.append(values[code[1]] if _is_argument(code) else self._decode(code))
        positional = len(values) - len(names)
        result, raised = None, None
        try:
            found = self._decode(function)(*values[:positional], **dict(zip(names, values[positional:], strict=True)))
            place = next((place for place, value in enumerate(values) if value is found), None)
            result = self._encode(found) if place is None else [ARGUMENT, place]
        except BaseException as error:  # noqa: BLE001 the other side gets it
            raised = self._described(error)
        after = [code if _is_argument(code) else self._encode(value) for code, value in zip(codes, values, strict=True)]
        return [result, raised, [[place, code] for place, code in enumerate(after) if code != codes[place]]]

    def _reference(self, value: Any) -> list[Any]:
        if isinstance(value, _Callback):
            return ["callback", value.number]
        if isinstance(value, types.ModuleType) and value is not self._objects[PROGRAM]:
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", [kind.__name__ for kind in value.__mro__], super()._reference(value)[1]]
        return super()._reference(value)

    def _resolve(self, code: list[Any]) -> Any:
        if code[0] == "o":
            return self._objects[code[1]]
        if code[0] == "python":
            return getattr(importlib.import_module(code[1]), code[2])
        return self._callbacks.setdefault(code[1], _Callback(self, code[1]))

    def call_back(self, number: int, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call function ``number`` of the tests."""
        codes = [self._encode(value) for value in (*values, *named.values())]
        return self._decode(self._ask("callback", number, codes, list(named)))


class _Callback:
    """A function of the tests, in the program's process."""

    def __init__(self, peer: ProgramPeer, number: int) -> None:
        self.peer = peer
        self.number = number

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.peer.call_back(self.number, values, named)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "length": len,
    "iterate": iter,
    "next": next,
    "true": bool,
    "text": str,
    "shown": repr,
    "hash": hash,
    "equal": lambda a, b: bool(a == b),
    "delete": delattr,
    "instance": isinstance,
    "subclass": issubclass,
}


class TestsPeer(_Peer):
    """The tests' end. What it receives comes from a hostile program."""

    __test__ = False  # no class of pytest

    def __init__(self, channel: int) -> None:
        super().__init__(channel)
        self._remote: dict[int, RemoteObject] = {}

    def names(self) -> dict[str, Any]:
        """Return the names of the program's module, with values. Names of Python itself keep their meaning."""
        found = ((str(name), code) for name, code in self._ask("names"))
        return {name: self._decode(code) for name, code in found if not name.startswith("__") and name not in BUILTINS}

    def module(self, name: str) -> types.ModuleType:
        """Return the module that stands for the program."""
        return _RemoteModule(name, self)

    def do(self, operation: str, *values: Any) -> Any:
        """Do an operation on objects of the program."""
        try:
            return self._decode(self._ask(operation, *(self._encode(value) for value in values)))
        except StopIteration:
            if operation == "next":
                raise
            raise RemoteError(STOPPED) from None

    def call(self, function: RemoteObject, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call an object of the program; arguments that it changes change here too."""
        values = [*positional, *named.values()]
        codes: list[Any] = []
        for value in values:
            same = next((place for place, other in enumerate(values[: len(codes)]) if other is value), None)
            codes.append(self._encode(value) if same is None else [ARGUMENT, same])
        try:
            result, raised, changed = self._ask("call", self._encode(function), codes, list(named))
            for place, code in changed:
                if not isinstance(values[place], RemoteObject):
                    values[place] = replace_contents(values[place], self._decode(code))
            if raised is not None:
                raise self._exception(*raised)
        except StopIteration:
            raise RemoteError(STOPPED) from None
        return values[result[1]] if _is_argument(result) else self._decode(result)

    def _do(self, operation: str, *arguments: Any) -> Any:
        if operation != "callback":
            raise PermissionError(operation)
        number, codes, names = arguments
        values = [self._decode(code) for code in codes]
        positional = len(values) - len(names)
        named = dict(zip(map(str, names), values[positional:], strict=True))
        return self._encode(self._objects[number](*values[:positional], **named))

    def _reference(self, value: Any) -> list[Any]:
        if isinstance(value, RemoteObject):
            return ["o", object.__getattribute__(value, "_number")]
        if not callable(value):
            raise TypeError(f"tests can pass plain data and functions to the program, not {type(value).__name__}")
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
        if module in ("builtins", *PLAIN_MODULES) and getattr(sys.modules.get(module), name, None) is value:
            return ["python", module, name]
        return ["callback", super()._reference(value)[1]]

    def _resolve(self, code: list[Any]) -> Any:
        if code[0] == "o":
            return self._remote.setdefault(int(code[1]), RemoteObject(self, int(code[1])))
        if code[0] == "callback":
            return self._objects[code[1]]
        if code[0] == "module":
            if code[1] in PLAIN_MODULES:
                return importlib.import_module(code[1])
            return types.ModuleType(str(code[1]))  # empty: it only names what the program has imported
        if code[0] == "exception":
            return self._exception_class([str(name) for name in code[1]])
        raise ValueError("the program sends something else")

    def _exception_class(self, names: list[str]) -> type[BaseException]:
        """Return a class of the tests' own for a class of the program."""
        base = next((found for name in names if (found := _builtin_exception(name))), Exception)
        if names[0] == base.__name__:
            return base
        if names[0] not in self._exceptions:
            self._exceptions[names[0]] = type(names[0], (base,), {"__str__": _text_of})
        return self._exceptions[names[0]]


def _text_of(error: BaseException) -> str:
    """Return the text that the program gives its exception."""
    return vars(error)[TEXT] if TEXT in vars(error) else super(type(error), error).__str__()


def _builtin_exception(name: str) -> type[BaseException] | None:
    found = getattr(builtins, str(name), None)
    usable = isinstance(found, type) and issubclass(found, (Exception, SystemExit))
    return found if usable else None


class _RemoteModule(types.ModuleType):
    """Stands for the program in ``sys.modules``: each name is looked up in the program when the tests use it."""

    def __init__(self, name: str, peer: TestsPeer) -> None:
        super().__init__(name)
        self.__dict__["_peer"] = peer
        self.__dict__["_program"] = RemoteObject(peer, PROGRAM)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # the names that the file of the tests already has keep their meaning
            own = sys._getframe(1).f_globals
            names = {one for one, value in self._peer.names().items() if not is_other_module(value)} - own.keys()
            return [one for one in sorted(names) if not one.startswith(("_", "test", "Test", "pytest"))]
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.do("get", self._program, name)


BUILTINS = frozenset(dir(builtins))


def is_other_module(value: Any) -> bool:
    """Return whether a name of the program is a module that the tests cannot have."""
    return isinstance(value, types.ModuleType) and value.__name__ not in PLAIN_MODULES


class RemoteObject:
    """An object of the program, in the process of the tests."""

    __slots__ = ("_number", "_peer")
    _peer: TestsPeer

    def __init__(self, peer: TestsPeer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "pytest", "_pytest")) and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._peer.do("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.do("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.do("delete", self, name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._peer.call(self, values, named)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.do("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.do("set_item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._peer.do("delete_item", self, key)

    def __len__(self) -> int:
        return operator.index(self._peer.do("length", self))

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)  # the program does not learn what is wanted

    def __iter__(self) -> Iterator[Any]:
        items = self._peer.do("iterate", self)
        while True:
            try:
                yield self._peer.do("next", items)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._peer.do("next", self)

    def __bool__(self) -> bool:
        return self._peer.do("true", self) is True

    def __str__(self) -> str:
        return str(self._peer.do("text", self))

    def __repr__(self) -> str:
        return str(self._peer.do("shown", self))

    def __hash__(self) -> int:
        return hash(self._peer.do("hash", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._peer.do("equal", self, other) is True

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, RemoteObject) and self._peer.do("instance", instance, self) is True

    def __subclasscheck__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._peer.do("subclass", other, self) is True

    def __enter__(self) -> Any:
        return self._peer.call(self._peer.do("get", self, "__enter__"), (), {})

    def __exit__(self, *error: object) -> None:
        self._peer.call(self._peer.do("get", self, "__exit__"), (None, None, None), {})
