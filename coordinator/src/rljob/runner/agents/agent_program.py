"""The program of an agent: a function of a user's package, which is started once for each sample."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rljob.api.extensions import is_async, load
from rljob.api.tasks import TaskAgent

ARGUMENTS = ("base_url", "api_key", "row", "seed")


@dataclass(frozen=True)
class AgentProgram:
    """A program that can be started.

    Args:
        function: of the user.
        arguments: those of :data:`ARGUMENTS` that the function takes.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]

    async def run(self, **given: Any) -> Any:
        """Run the program and return what it returns. A function that is not async runs in a thread of its own. A
        thread cannot be ended: if this call is cancelled, its next call of the model is refused.

        Args:
            given: a value for each of :data:`ARGUMENTS`.
        """
        arguments = {name: given[name] for name in self.arguments}
        if is_async(self.function):
            return await self.function(**arguments)
        return await _in_thread(lambda: self.function(**arguments))


def load_program(agent: TaskAgent, field: str) -> AgentProgram:
    """Return the program of ``tasks[].agent``.

    Args:
        agent: the field.
        field: its path, for errors.

    Raises:
        ValueError: the function cannot be imported, or has a parameter that no agent gets.
    """
    function: Any = load({}, agent.function, f"{field}.function")
    if isinstance(function, type) or not callable(function):
        raise ValueError(f"{field}.function: {agent.function} is not a function; define it as async def")
    taken = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            taken += [name for name in ARGUMENTS if name not in taken]
        elif parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            taken.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ValueError(
                f"{field}.function: {agent.function} has the parameter {parameter.name}; an agent gets "
                f"{', '.join(ARGUMENTS)}, each by its name"
            )
    return AgentProgram(function, tuple(taken))


async def _in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if not result.done():  # it is, if the sample ended meanwhile
            result.set_result(value) if error is None else result.set_exception(error)

    def run() -> None:
        value, raised = None, None
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 it is raised in the event loop
            raised = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, raised)

    threading.Thread(target=run, daemon=True, name="agent").start()  # daemon: it does not keep the runner alive
    return await result
