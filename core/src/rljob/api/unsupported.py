"""Fields and values of the manifest that are not supported yet: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rljob.api.diff import non_defaults

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec

NOT_YET: dict[str, tuple[str, ...] | None] = {
    "storage.uri": None,
    "models[*].adapter": None,
    "models[*].placement": None,
    "scheduling.gang.provider": ("kubernetes", "volcano", "coscheduling", "kueue"),
    "scheduling.gang.queue": None,
    "environments": None,
    "trainer.backend": ("megatron",),
    "trainer.parallelism.tensor": None,
    "trainer.parallelism.pipeline": None,
    "trainer.parallelism.context": None,
    "trainer.parallelism.expert": None,
    "rollouts[*].model": None,
    "rollouts[*].engine": ("sglang",),
    "rollouts[*].hosts": None,
    "rollouts[*].parallelism.tensor": None,
    "rollouts[*].parallelism.pipeline": None,
    "rollouts[*].parallelism.data": None,
    "rollouts[*].placement": None,
    "weightSync.transport": ("ipc",),
    "weightSync.groups": None,
}
"""Path below spec → the values not supported yet; None: every value but the default."""


def unsupported(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each field with an unsupported value."""
    for pattern, values in NOT_YET.items():
        for found in non_defaults(spec, pattern):
            if values is None or found.value in values:
                yield f"{found.path}: {sentence(found.value, found.default)}"
    if "policy" in (names := [model.name for model in spec.models]):
        for i, name in enumerate(names):
            if name != "policy":
                yield f"models[{i}]: a model besides policy ({name}) is not supported yet; remove it"


def near_miss(location: Sequence[str | int], value: Any, known: str, default: Any) -> str | None:
    """Return the refusal of a misspelt unsupported value (colocated for Colocated), or None.

    Args:
        location: of the field, as in pydantic's errors.
        value: none of the field's values.
        known: the field's values, each in single quotes.
        default: of the field.
    """
    pattern = "".join("[*]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".spec.")
    if pattern not in NOT_YET or not isinstance(value, str) or f"'{value.casefold()}'" not in known.casefold():
        return None
    values = NOT_YET[pattern]
    if value.casefold() == str(default).casefold() or (values is not None and value.casefold() not in values):
        return None
    return sentence(value, default)


def sentence(value: Any, default: Any) -> str:
    """Return the refusal of ``value`` where only ``default`` is supported."""
    shown = f"{on_one_line(str(value))} is " if isinstance(value, str | int) else ""
    instead = f" or set {default}" if default is not None and shown else ""
    return f"{shown}not supported yet; remove it{instead}"


def on_one_line(text: str) -> str:
    """Return ``text`` with control characters escaped, for a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
