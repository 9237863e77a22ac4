"""Declaration of an environment without its code: options, and the reference to its class.

The API, the operator and the runner read an :class:`EnvironmentKind` without importing the environment, which may need
libraries that only the environment service has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rljob.api.base import Model
from rljob.api.configurable import NoOptions, check_options, option_problems, parse


@dataclass(frozen=True)
class EnvironmentKind:
    """An environment with options. ``spec.environments[].function`` may name an EnvironmentKind.

    ``make(options)`` returns the environment of one episode (:mod:`rljob.environments.sdk_types`); the service calls it
    once for each session. It may be module:attribute of a module that only the service imports. ``options``: model of
    ``config``. ``summary``: one sentence for the documentation. ``needs_package``: ``make`` and ``reset``,
    which are not async, check the options with a package that only the service has; it calls both once when it starts.

    Raises:
        ValueError: ``options`` is not a Model.
    """

    make: str | Callable[[Any], Any]
    options: type[Model] = NoOptions
    summary: str = ""
    needs_package: bool = False

    def __post_init__(self) -> None:
        check_options(self.options, "an EnvironmentKind")

    def parse(self, config: Mapping[str, Any]) -> Model:
        """See :func:`rljob.api.configurable.parse`."""
        return parse(self, config)

    def option_problems(self, config: Mapping[str, Any]) -> Iterator[str]:
        """See :func:`rljob.api.configurable.option_problems`."""
        return option_problems(self, config)
