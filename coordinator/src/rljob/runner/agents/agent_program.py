"""The program of an agent, which is started once for each sample: a function of a user's package, or a command."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rljob.api.extensions import is_async, load
from rljob.api.tasks import TaskAgent
from rljob.runner.agents.agent_command import AgentCommand, check_program

ARGUMENTS = ("base_url", "api_key", "row", "seed")


class AgentProgram(Protocol):
    """A program that can be started."""

    async def run(self, base_url: str, api_key: str, row: Mapping[str, Any], seed: int) -> Any:
        """Run the program; return None, a reward, or a text."""


@dataclass(frozen=True)
class AgentFunction:
    """A function of a user's package.

    Args:
        function: of the user.
        arguments: those of :data:`ARGUMENTS` that the function takes.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]

    async def run(self, base_url: str, api_key: str, row: Mapping[str, Any], seed: int) -> Any:
        """Call the function and return what it returns. If it is not async, it runs in a thread of its own. A thread
        cannot be ended: if this call is cancelled, the function's next call of the model is refused."""
        given = {"base_url": base_url, "api_key": api_key, "row": row, "seed": seed}
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
        ValueError: the function cannot be imported, or has a parameter that no agent gets; or there is no such command.
    """
    if agent.command is not None:
        check_program(agent.command[0], f"{field}.command[0]")
        return AgentCommand(agent.command)
    assert agent.function is not None, "an agent has a function or a command"
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
    return AgentFunction(function, tuple(taken))


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
