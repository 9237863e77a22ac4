"""The tests' end of the channel to the program: its functions, classes and objects.

The tests hold a :class:`RemoteObject` for each function, class and object of the program. What the tests ask of it is
done in the program's process. A remote object is never equal to plain data, has no order and no arithmetic, because the
program would decide these, and a wrong answer could call itself right. Of the tests, the program can only call
functions that they passed as arguments.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

from rljob.rewards.sandbox.call_channel import (
    ARGUMENT,
    PROGRAM,
    TEXT,
    ChannelPeer,
    RemoteError,
    applied,
    builtin_exception,
    is_argument,
)
from rljob.rewards.sandbox.plain_data import replace_contents

STOPPED = "StopIteration"
"""What a RemoteError says in place of a StopIteration of the program, which would end a loop of the tests, and skip
what they compare."""
PLAIN_MODULES = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json"),
    *("math", "operator", "random", "re", "statistics", "string", "typing"),
)
"""Modules that tests may use although only the program imports them; the tests get the real ones."""


class TestsPeer(ChannelPeer):
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
        return values[result[1]] if is_argument(result) else self._decode(result)

    def _do(self, operation: str, *arguments: Any) -> Any:
        if operation != "callback":
            raise PermissionError(operation)
        number, codes, names = arguments
        return self._encode(applied(self._objects[number], [self._decode(code) for code in codes], names))

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
        base = next((found for name in names if (found := builtin_exception(name))), Exception)
        if names[0] == base.__name__:
            return base
        if names[0] not in self._exceptions:
            self._exceptions[names[0]] = type(names[0], (base,), {"__str__": _text_of})
        return self._exceptions[names[0]]


def _text_of(error: BaseException) -> str:
    """Return the text that the program gives its exception."""
    return vars(error)[TEXT] if TEXT in vars(error) else super(type(error), error).__str__()


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
