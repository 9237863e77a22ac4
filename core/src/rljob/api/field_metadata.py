"""Metadata of the manifest's fields: reader, mutability, effect on one machine, unsupported values.

A field of a model, or its type (PodTemplate), is annotated with a :class:`FieldMeta`. :func:`manifest_fields` walks
the models once; everything that depends on a field's reader, mutability, local effect or support is derived from it:

- the transition rules of the CRD (:mod:`rljob.api.immutable`) and the check that a run belongs to a job,
- the refusal of values that are not supported yet (:mod:`rljob.api.unsupported`),
- the hashes of roles and the content of job.json (:mod:`rljob.manifests.hashes`),
- the content key of the initializer (:mod:`rljob.protocol.initializer_stamp`),
- the warnings of `rljob run` (:mod:`rljob.local.field_support`) and the columns of docs/manifest.md.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Reader: TypeAlias = Literal["operator", "objects", "pods", "coordinator", "components"]
"""The reader of a field:

- ``operator``: the operator or `rljob run` bases decisions on it; no Kubernetes object depends on it.
- ``objects``: shapes Kubernetes objects of the job other than the pods of one role. A change restarts no pod.
- ``pods``: shapes the pods of one role. A change restarts these pods.
- ``coordinator``: the coordinator. A change restarts the coordinator only.
- ``components``: any process may read it, and results of the run may depend on it. The field defines the run.
"""
Mutability: TypeAlias = Literal["never", "always", "raise"]
"""``raise``: the number can only be raised."""
Unsupported: TypeAlias = tuple[str, ...] | Literal[True]
"""Values that are not supported yet; True: every value except the default."""


@dataclass(frozen=True, kw_only=True)
class FieldMeta:
    """Annotation of a field. Omitted attributes are those of the parent field; the default reader is ``components``.

    ``mutable``: by default ``never`` for the reader ``components``, ``always`` for other readers.
    ``local``: reason why the field and all fields below it have no effect under `rljob run`.
    ``local_part``: the part of the value that `rljob run` applies, if it does not apply the whole value.
    ``unsupported``: applies to the field and all fields below it. Planned names of an extension point are unsupported
    without this attribute.
    """

    reader: Reader | None = None
    mutable: Mutability | None = None
    local: str = ""
    local_part: str = ""
    unsupported: Unsupported = ()


@dataclass(frozen=True)
class ManifestField:
    """A field of the manifest with its complete metadata.

    ``path``: spec.rollouts[].replicas.max; [] stands for the entries of a list.
    ``reader``, ``mutable``: for a field with fields below it, their common value; if they differ, the field's own
    reader, and ``partly``.
    ``group``: the field has fields below it.
    ``embedded``: the field is a mapping that always exists; its fields are compared with their defaults one by one.
    """

    path: str
    reader: Reader
    mutable: Mutability | Literal["partly"]
    local: str
    local_part: str
    unsupported: Unsupported
    group: bool
    embedded: bool

    @property
    def name(self) -> str:
        """The path without []: spec.rollouts.replicas.max."""
        return self.path.replace("[]", "")

    @property
    def defines_run(self) -> bool:
        """Whether the value is part of the run's identity: a run is never resumed with another value."""
        return self.reader == "components"


Fields: TypeAlias = Mapping[str, ManifestField]
"""Path → field, parents before the fields below them."""


@functools.cache
def manifest_fields(model: type[BaseModel]) -> Fields:
    """Return all fields of ``model`` and of the models below it; paths begin at ``model``."""
    return {field.path: field for field in _walk(model, "", FieldMeta(reader="components"))}


def field_at(fields: Fields, path: str) -> ManifestField:
    """Return the innermost field on a path with indices. For spec.tasks[0].data.columns.a it is columns."""
    known = re.sub(r"\[\d+\]", "[]", path)
    while known and known not in fields:
        known = known.removesuffix("[]") if known.endswith("[]") else known.rpartition(".")[0]
    return fields[known]


def outermost(fields: Fields, holds: Callable[[ManifestField], Any]) -> Iterator[ManifestField]:
    """Yield the outermost fields for which ``holds``; instead of an embedded mapping, the fields below it."""
    found: list[str] = []
    for path, field in fields.items():
        if holds(field) and not field.embedded and not path.startswith(tuple(found)):
            found += [f"{path}.", f"{path}[]"]
            yield field


def select(value: Mapping[str, Any], fields: Fields, readers: Collection[Reader], path: str = "") -> dict[str, Any]:
    """Return the fields in ``value`` that one of ``readers`` reads.

    Args:
        value: data of a model, under the field names of the manifest.
        fields: fields of this model.
        readers: embedded mappings without a field of these readers are omitted.
        path: path of ``value`` in ``fields``.
    """
    kept: dict[str, Any] = {}
    for name, inner in value.items():
        here = f"{path}.{name}" if path else name
        field = fields[here]
        if field.group and isinstance(inner, dict):
            below = select(inner, fields, readers, here)
            if below or (field.reader in readers and not field.embedded):
                kept[name] = below
        elif field.group and isinstance(inner, list):
            if field.reader in readers:
                kept[name] = [select(entry, fields, readers, f"{here}[]") for entry in inner]
        elif field.reader in readers:
            kept[name] = inner
    return kept


def _walk(model: type[BaseModel], prefix: str, inherited: FieldMeta) -> Iterator[ManifestField]:
    for name, info in model.model_fields.items():
        annotations = list(_annotations(info))
        meta = _inherit(inherited, [found for found in annotations if isinstance(found, FieldMeta)])
        inner, listed = nested_model(info.annotation)
        path = f"{prefix}{info.alias or name}"
        below = list(_walk(inner, f"{path}{'[]' if listed else ''}.", meta)) if inner else []
        leaves = [field for field in below if not field.group]
        readers = {field.reader for field in leaves}
        reader = readers.pop() if len(readers) == 1 else meta.reader
        assert reader is not None
        changes = {field.mutable for field in leaves} or {_mutable(meta)}
        yield ManifestField(
            path=path,
            reader=reader,
            mutable=changes.pop() if len(changes) == 1 else "partly",
            local=meta.local,
            local_part=meta.local_part,
            unsupported=meta.unsupported,
            group=inner is not None,
            embedded=inner is not None and not listed and info.default is not None and not info.is_required(),
        )
        yield from below


def _annotations(info: FieldInfo) -> Iterator[Any]:
    """Yield the metadata of a field, then of its type."""
    yield from info.metadata
    pending = [info.annotation]
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) is Annotated:
            yield from get_args(annotation)[1:]
            pending.append(get_args(annotation)[0])
        else:
            pending += [inner for inner in get_args(annotation) if get_origin(inner) or isinstance(inner, type)]


def _inherit(inherited: FieldMeta, own: Sequence[FieldMeta]) -> FieldMeta:
    """Return the metadata of a field: per attribute the first value in ``own``, else the value of the parent field."""
    if not own:
        return inherited
    reader = next((meta.reader for meta in own if meta.reader), None)
    return FieldMeta(
        reader=reader or inherited.reader,
        # The inherited mutability belongs to the inherited reader.
        mutable=next((meta.mutable for meta in own if meta.mutable), None if reader else inherited.mutable),
        local=inherited.local or next((meta.local for meta in own if meta.local), ""),
        local_part=next((meta.local_part for meta in own if meta.local_part), ""),
        unsupported=inherited.unsupported or next((meta.unsupported for meta in own if meta.unsupported), ()),
    )


def _mutable(meta: FieldMeta) -> Mutability:
    return meta.mutable or ("never" if meta.reader == "components" else "always")


def nested_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model inside ``X``, ``X | None``, ``list[X]`` or ``Annotated[X, …]``, and whether it is in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in get_args(annotation):
        model, listed = nested_model(inner)
        if model is not None:
            return model, listed or get_origin(annotation) is list
    return None, False
