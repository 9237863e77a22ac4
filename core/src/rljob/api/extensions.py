"""Extension points: manifest fields that name code.

The value of such a field is the name of a built-in implementation or ``module:attribute`` of a user's own package. The
registries here map each built-in name to its ``module:attribute``; a new implementation is one file and one line here.
The manifest, the CRD, `rljob explain` and the process that loads the implementation all read these registries. This
module imports no implementation: the operator and the CLI know the names without torch or vLLM.
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

from rljob.api import engine_registry
from rljob.api.diff import shortened

Registry: TypeAlias = Mapping[str, str]
"""Name of a built-in implementation → its module:attribute."""

_ADVANTAGES, _OBJECTIVES = "rljob.trainer.algorithms.advantages", "rljob.trainer.algorithms.objectives"
_CORRECTIONS, _AGGREGATION = "rljob.trainer.algorithms.corrections", "rljob.trainer.algorithms.aggregation"
_KL = "rljob.trainer.algorithms.kl_estimators"

ADVANTAGES: Registry = {
    "group_normalized": f"{_ADVANTAGES}.group:group_normalized",
    "group_centered": f"{_ADVANTAGES}.group:group_centered",
    "reward": f"{_ADVANTAGES}.group:reward",
    "rloo": f"{_ADVANTAGES}.group:rloo",
    "opo": f"{_ADVANTAGES}.opo:opo",
    "lite_ppo": f"{_ADVANTAGES}.lite_ppo:lite_ppo",
    "reinforce_pp": f"{_ADVANTAGES}.reinforce_pp:reinforce_pp",
    "reinforce_pp_baseline": f"{_ADVANTAGES}.reinforce_pp:reinforce_pp_baseline",
    "turn_return": f"{_ADVANTAGES}.turn_return:turn_return",
    "zero": f"{_ADVANTAGES}.group:zero",
}
OBJECTIVES: Registry = {
    "ppo_clip": f"{_OBJECTIVES}.ppo_clip:ppo_clip",
    "gspo": f"{_OBJECTIVES}.gspo:gspo",
    "segment_clip": f"{_OBJECTIVES}.gspo:segment_clip",
    "cispo": f"{_OBJECTIVES}.truncated:cispo",
    "tis": f"{_OBJECTIVES}.truncated:tis",
    "topr": f"{_OBJECTIVES}.truncated:topr",
    "raft_pp": f"{_OBJECTIVES}.ppo_clip:raft_pp",
    "sapo": f"{_OBJECTIVES}.sapo:sapo",
    "kimi": f"{_OBJECTIVES}.kimi:kimi",
}
CORRECTIONS: Registry = {
    "none": f"{_CORRECTIONS}.importance_weights:no_correction",
    "tis": f"{_CORRECTIONS}.importance_weights:tis",
    "icepop": f"{_CORRECTIONS}.importance_weights:icepop",
}
AGGREGATIONS: Registry = {
    "token_mean": f"{_AGGREGATION}:token_mean",
    "seq_mean_token_sum": f"{_AGGREGATION}:seq_mean_token_sum",
    "seq_mean_token_mean": f"{_AGGREGATION}:seq_mean_token_mean",
    "seq_mean_token_sum_norm": f"{_AGGREGATION}:seq_mean_token_sum_norm",
}
KL_ESTIMATORS: Registry = {name: f"{_KL}:{name}" for name in ("k1", "k2", "k3", "k3_unbiased")}
BACKENDS: Registry = {
    "fsdp": "rljob.trainer.backends.fsdp.backend:FsdpBackend",
    "megatron": "rljob.trainer.backends.megatron.megatron_backend:MegatronBackend",
}
ENGINES: Registry = {name: engine.adapter for name, engine in engine_registry.ENGINES.items()}
LOOPS: Registry = {
    "single_turn": "rljob.runner.loops.single_turn:single_turn",
    "environment": "rljob.runner.loops.episode_loop:environment",
}

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
        ValueError: there is no such module or attribute, or the module cannot be imported.
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
        if not hasattr(found, name):
            raise ValueError(f"{field}: module {module} has no attribute {path}; correct {value!r}")
        found = getattr(found, name)
    return found


def is_async(found: Any) -> bool:
    """Return whether a function, or a callable object, is async."""
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
