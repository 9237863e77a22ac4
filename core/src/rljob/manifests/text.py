"""Objects as YAML that kubectl takes and people read."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from rljob.api.yaml_loader import Dumper
from rljob.manifests.context import Object


class _Lines(Dumper):
    """Writes text of several lines in lines."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Lines.add_representer(str, _represent_text)


def to_yaml(objects: Iterable[Object]) -> str:
    """Return one document for each object."""
    return yaml.dump_all(objects, Dumper=_Lines, sort_keys=False, allow_unicode=True, width=120, explicit_start=True)
