"""Loads an RLJob from a file: YAML, overrides, validation. Every failure is a ManifestError with messages for users."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rljob.api.errors import ManifestError, sentences
from rljob.api.models import RLJob
from rljob.api.yaml_loader import YamlError, read_yaml

_STEP = re.compile(r"\.?([^.\[\]=]+)|\[([^\[\]=]+)\]")


def load(path: str | Path, overrides: Sequence[str] = ()) -> RLJob:
    """Return the job of a manifest file.

    Args:
        path: the file.
        overrides: each ``PATH=VALUE``, for example ``spec.training.steps=5``; see :func:`override`.

    Raises:
        ManifestError: the file cannot be read or is not a valid manifest, or an override does not fit it.
    """
    source = str(path)
    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError:
        raise ManifestError(["there is no such file; give the path of a manifest"], source) from None
    except UnicodeDecodeError as error:
        raise ManifestError([f"not UTF-8 at byte {error.start}; save it as UTF-8"], source) from None
    except OSError as error:
        raise ManifestError([f"cannot be read: {(error.strerror or str(error)).lower()}"], source) from None
    return loads(text, overrides, source)


def loads(text: str, overrides: Sequence[str] = (), source: str = "") -> RLJob:
    """Return the job of a manifest's text. Errors name ``source``.

    Raises:
        ManifestError: as :func:`load`.
    """
    try:
        data = read_yaml(text)
    except YamlError as error:
        raise ManifestError([str(error)], source) from None
    if not isinstance(data, dict):
        cause = "is empty" if data is None else "is not a mapping"
        raise ManifestError([f"the manifest {cause}; it begins with apiVersion: rljob.dev/v1alpha1"], source)
    for entry in overrides:
        override(data, entry)
    return validate(data, source)


def validate(data: dict[str, Any], source: str = "") -> RLJob:
    """Return the job in ``data`` from :func:`read_yaml`. Types are JSON types; no value is converted.

    Raises:
        ManifestError: the manifest is invalid; the error contains every problem.
    """
    try:
        # As on the API server: "5" is not a number (strict), and snake_case is unknown (by_name off).
        job = RLJob.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(sentences(error, RLJob), source) from None
    missing = [f"{name}: required; add {name}: {value}" for name, value in _HEADER.items() if name not in data]
    if missing:
        raise ManifestError(missing, source)
    return job


_HEADER = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob"}


def override(data: dict[str, Any], entry: str) -> None:
    """Set one value of a manifest in place.

    Args:
        data: the manifest from :func:`read_yaml`.
        entry: ``PATH=VALUE``. An entry of a list is chosen by index or by name: ``spec.tasks[0].weight=2`` or
            ``spec.tasks[sums].weight=2``. VALUE is YAML. Missing mappings on the path are created, and so is a
            missing or empty list by its first entry: ``spec.algorithm.teachers[0].model=big``.

    Raises:
        ManifestError: the path or the value is invalid. The manifest itself is validated later.
    """
    path, equals, text = entry.partition("=")
    steps = _parse_path(path)
    if not equals or not steps:
        raise ManifestError([f"--set {entry}: write it as PATH=VALUE, for example spec.training.steps=5"])
    try:
        value = read_yaml(text)
    except YamlError as error:
        raise ManifestError([f"--set {entry}: {error}"]) from None
    here: Any = data
    for i, step in enumerate(steps):
        where = f"--set {entry}: {_path_text(steps[:i]) or 'the manifest'}"
        key = _key(here, step, where)
        if i == len(steps) - 1:
            here[key] = value
            return
        if here[key] is None if isinstance(here, list) else here.get(key) is None:
            here[key] = _container(steps[i + 1], f"--set {entry}: {_path_text(steps[: i + 1])}")
        here = here[key]


_Step = tuple[str, bool]
"""Text of one step of a path, and whether the step is in brackets."""
_FIRST: _Step = ("0", True)


def _container(step: _Step, where: str) -> Any:
    """Return what a missing value becomes that ``step`` enters. ``where`` begins the message of an error."""
    text, bracketed = step
    if bracketed and not text.isdecimal():
        raise ManifestError([f"{where}: is not set; write .{text} for its field, or [0] for its first entry"])
    return [] if bracketed else {}


def _parse_path(path: str) -> list[_Step]:
    steps, position = [], 0
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            return []
        steps.append((match[1] or match[2], match[1] is None))
        position = match.end()
    return steps


def _path_text(steps: Sequence[_Step]) -> str:
    return "".join(f"[{text}]" if bracketed else f".{text}" for text, bracketed in steps).lstrip(".")


def _key(here: Any, step: _Step, where: str) -> Any:
    """Return the key or index of ``step`` in ``here``. ``where`` begins the message of an error."""
    text, bracketed = step
    if bracketed and isinstance(here, list):
        if not here and step == _FIRST:
            here.append(None)
            return 0
        names = [entry.get("name") if isinstance(entry, dict) else None for entry in here]
        if text in names:
            return names.index(text)
        if text.isdecimal() and int(text) < len(here):
            return int(text)
        known = ", ".join(str(name) for name in names if name is not None)
        raise ManifestError([f"{where}: has no entry [{text}]; there are {len(here)}{f': {known}' if known else ''}"])
    if not bracketed and isinstance(here, dict):
        return text
    if isinstance(here, list):
        raise ManifestError([f"{where}: is a list; choose an entry by index or name, for example [0]"])
    if isinstance(here, dict):
        raise ManifestError([f"{where}: is a mapping; write .{text}"])
    raise ManifestError([f"{where}: is a single value and has no {text}"])
