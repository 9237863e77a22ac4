"""The program's end of the channel to its tests: does what they ask of its functions and objects."""

from __future__ import annotations

import importlib
import operator
import types
from collections.abc import Callable
from typing import Any

from rljob.rewards.sandbox.call_channel import ARGUMENT, PROGRAM, ChannelPeer, applied, is_argument


class ProgramPeer(ChannelPeer):
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
            values.append(values[code[1]] if is_argument(code) else self._decode(code))
        result, raised = None, None
        try:
            found = applied(self._decode(function), values, names)
            place = next((place for place, value in enumerate(values) if value is found), None)
            result = self._encode(found) if place is None else [ARGUMENT, place]
        except BaseException as error:  # noqa: BLE001 the other side gets it
            raised = self._described(error)
        after = [code if is_argument(code) else self._encode(value) for code, value in zip(codes, values, strict=True)]
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
