"""Extension points: manifest fields that name code.

The value of such a field is the name of a built-in implementation or ``module:attribute`` of a user's own package. The
registries here map each built-in name to its ``module:attribute``; a new implementation is one file and one line: of a
loop or a backend here, of a function of the algorithm in :mod:`rljob.api.algorithm_functions`, of an engine in
:mod:`rljob.api.engine_registry`. The manifest, the CRD, `rljob explain` and the process that loads the implementation
all read these registries. This module imports no implementation: the operator and the CLI know the names without torch
or vLLM.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rljob.api import algorithm_functions, engine_registry
from rljob.api.builtin import Builtin, references
from rljob.api.diff import shortened

Registry: TypeAlias = Mapping[str, str]
"""Name of a built-in implementation → its module:attribute."""

BUILTIN_BACKENDS = {
    "fsdp": Builtin("rljob.trainer.backends.fsdp.backend:FsdpBackend", "PyTorch FSDP2"),
    "megatron": Builtin(
        "rljob.trainer.backends.megatron.megatron_backend:MegatronBackend",
        "Megatron-Core, for models of type qwen2, qwen3, llama and qwen3_moe",
    ),
}
BUILTIN_LOOPS = {
    "single_turn": Builtin("rljob.runner.loops.single_turn:single_turn", "one prompt, one answer, one score"),
    "environment": Builtin("rljob.runner.loops.episode_loop:environment", "turn by turn in the task's environment"),
    "agent": Builtin(
        "rljob.runner.loops.agent_loop:agent", "the task's agent program calls the model by an API like OpenAI's"
    ),
}

ADVANTAGES: Registry = references(algorithm_functions.ADVANTAGES)
OBJECTIVES: Registry = references(algorithm_functions.OBJECTIVES)
CORRECTIONS: Registry = references(algorithm_functions.CORRECTIONS)
AGGREGATIONS: Registry = references(algorithm_functions.AGGREGATIONS)
KL_ESTIMATORS: Registry = references(algorithm_functions.KL_ESTIMATORS)
BACKENDS: Registry = references(BUILTIN_BACKENDS)
LOOPS: Registry = references(BUILTIN_LOOPS)
ENGINES: Registry = {name: engine.adapter for name, engine in engine_registry.ENGINES.items()}

MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
REFERENCE = f"{MODULE}:{MODULE}"
MAX_LENGTH = 253


@dataclass(frozen=True, eq=False)
class Extension:
    """Annotation of a string field that names an implementation.

    ``registry``: the built-in implementations. ``references``: whether module:attribute is also valid.
    """

    registry: Collection[str]
    references: bool = True

    @property
    def pattern(self) -> str:
        """Regular expression of all valid values."""
        references = [REFERENCE] if self.references else []
        return f"^({'|'.join((*self.registry, *references))})$"

    def check(self, value: str) -> str:
        """Return ``value``.

        Raises:
            PydanticCustomError: it is neither a built-in name nor a reference, or it is too long.
        """
        if len(value) > MAX_LENGTH:
            raise PydanticCustomError(
                "extension_length",
                "must have at most {most} characters, not {length}: {value}",
                {"most": MAX_LENGTH, "length": len(value), "value": shortened(repr(value))},
            )
        if re.fullmatch(self.pattern, value):
            return value
        names = {name.casefold(): name for name in self.registry}
        close = difflib.get_close_matches(value.casefold(), names, 1)
        own = ["module:attribute of your own package"] if self.references else []
        raise PydanticCustomError(
            "extension",
            "must be {names}, not {value}{hint}",
            {
                "names": " or ".join([*map(repr, self.registry), *own]),
                "value": shortened(repr(value)),
                "hint": f"; did you mean {names[close[0]]}?" if close else "",
                "expected": " or ".join(map(repr, self.registry)),
            },
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate the string by :meth:`check`."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Give the CRD the names, or the pattern and the length."""
        if not self.references:
            return {**handler(schema), "enum": [*self.registry]}
        return {**handler(schema), "pattern": self.pattern, "maxLength": MAX_LENGTH, "examples": [*self.registry]}


Reference: TypeAlias = Annotated[str, Extension({})]
"""module:attribute of a user's own package."""


def load(registry: Registry, value: str, field: str) -> Any:
    """Import and return the implementation that a field of the manifest names.

    Args:
        registry: the built-in implementations of the field.
        value: name of a built-in implementation, or module:attribute.
        field: path of the field, for errors.

    Raises:
        ValueError: there is no such module or attribute, or the module cannot be imported, or the attribute not read.
    """
    module, _, path = registry.get(value, value).partition(":")
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise any exception, and may call sys.exit()
        raise ValueError(
            f"{field}: module {module} cannot be imported ({type(error).__name__}: {error}); install its package where "
            "this process runs (in a cluster: in the image of its template)"
        ) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ValueError(f"{field}: module {module} has no attribute {path}; correct {value!r}") from None
        except (Exception, SystemExit) as error:  # as above: a module may have a function __getattr__
            raise ValueError(
                f"{field}: attribute {path} of module {module} cannot be read ({type(error).__name__}: {error}); "
                "correct the module"
            ) from error
    return found


def is_async(found: Any) -> bool:
    """Return whether a function, or a callable object, is async."""
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
