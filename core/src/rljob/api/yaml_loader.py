"""Reads YAML of manifests so that ``rljob run`` and ``kubectl apply`` get the same values from the same text.

kubectl reads with sigs.k8s.io/yaml (YAML 1.1 in part, then JSON). A plain scalar that versions of YAML, or kubectl,
read differently is refused with its line: ``on``, ``0777``, ``0x10``, ``1_000``, ``1:30``, ``2026-01-02``, ``<<``, and
a whole number that neither an integer nor a float of 64 bits holds. The exception is a float without a point
(``3e-4``): YAML 1.2 and kubectl read a number, and so does this loader.
Keys are text and unique. As in JSON, a whole float is a whole number: ``1e3`` is 1000.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from rljob.api.text_escape import escape_block

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
LONGEST_SCALAR = 60
"""Maximum length of a scalar in a message, in characters."""
INT64 = range(-(2**63), 2**63)
"""Range of integers in Kubernetes; larger numbers are floats there."""
_JSON_WRITES_WHOLE_BELOW = 1e21  # Go's encoding/json encodes a whole float below this bound without a point

_STANDARD, _PLAIN = "tag:yaml.org,2002:", "tag:rljob.dev,2026:"
"""Prefixes of tags. An explicit tag such as !!int is refused; the tag of a plain scalar is not."""
_REFUSED: dict[str, tuple[str, str]] = {
    r"y|Y|yes|Yes|YES|on|On|ON": ("is true to kubectl and text in YAML 1.2", "write true"),
    r"n|N|no|No|NO|off|Off|OFF": ("is false to kubectl and text in YAML 1.2", "write false"),
    r"[-+]?0[0-9_]+(\.[0-9_]*)?([eE][-+]?[0-9]+)?": (
        "has a leading zero, which some readers of YAML interpret as octal",
        "leave out leading zeros",
    ),
    r"(?!_)[-+]?_*0_*([xX][0-9a-fA-F_]+|[bB][01_]+|[oO][0-7_]+)": (
        "is a number to some readers of YAML and text to others",
        "write a decimal number",
    ),
    r"(?!_)(?=.*_)[-+]?(\.[0-9_]+|[0-9_]+(\.[0-9_]*)?)([eE]_*[-+]?[0-9_]+)?": (
        "is a number in YAML 1.1 and text in YAML 1.2",
        "leave out underscores",
    ),
    r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?": ("is a number of base 60 in YAML 1.1", "write a decimal number"),
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(([Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}.*)?": ("is a date in YAML 1.1", ""),
    r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)": ("is infinite or not a number, which JSON cannot hold", "write a number"),
    r"<<": ("merges mappings in YAML 1.1 and is text in YAML 1.2", "write the fields out"),
    r"=": ("has a special meaning in YAML 1.1", ""),
}
"""Regular expression of a plain scalar → cause of the refusal, and a remedy besides quotes."""
_KINDS = {
    kind: re.compile(rf"(?:{pattern})\Z")
    for kind, pattern in {
        "refused": "|".join(_REFUSED),
        "null": r"~|null|Null|NULL|",
        "bool": r"true|True|TRUE|false|False|FALSE",
        "int": r"[-+]?[0-9]+",
        "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    }.items()
}
"""Kind of a plain scalar → its pattern. The first match counts; a scalar without a match is text."""


class YamlError(ValueError):
    """The text is not YAML of a manifest. The message is one sentence, with line and column if known."""


def read_yaml(text: str) -> Any:
    """Return the only document in ``text`` as dicts with text keys, lists, text, numbers, booleans and None.

    Raises:
        YamlError: the text is not YAML or too large, or it has several documents, a duplicate key, a scalar that
            kubectl or another version of YAML reads differently, or a tag or value that JSON cannot represent.
    """
    if len(text.encode()) > MAX_BYTES:
        raise YamlError(f"the text is longer than {MAX_BYTES:,} bytes, the maximum of a manifest")
    try:
        data = yaml.load(text, _Loader)  # a subclass of SafeLoader
        _check_size(data)
        return _without_aliases(data)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_sentence(error)) from None
    except yaml.YAMLError as error:
        raise YamlError(f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise YamlError("the text is nested too deeply to be a manifest") from None


def plain_kind(text: str) -> str:
    """Return the kind of ``text`` as a plain scalar: null, bool, int, float, refused, or text."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.match(text)), "text")


def write_yaml(data: Any) -> str:
    """Return YAML that :func:`read_yaml` reads as ``data``."""
    return escape_block(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def _sentence(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if "expected a single document" in (error.context or ""):
        return f"{where}a second document begins; keep one RLJob in a file"
    if "recursive" in (error.problem or ""):
        return f"{where}an anchor contains an alias of itself, so its value is infinite; write the values out"
    if r"'\t'" in (error.problem or ""):
        return f"{where}a tab; indent with spaces"
    return where + " ".join(filter(None, (error.context, error.problem)))


def _check_size(data: Any) -> None:
    """Refuse aliases that make a small text large."""
    pending, count = [data], 0
    while pending:
        value = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise YamlError(f"there are more than {MAX_VALUES:,} values once aliases are expanded")
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _without_aliases(data: Any) -> Any:
    """Return a copy in which every alias has its own copy of the value, so that each can be changed alone."""
    if isinstance(data, dict):
        return {key: _without_aliases(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_aliases(value) for value in data]
    return data


def _quote(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SCALAR else f"{text[: LONGEST_SCALAR - 1]}…")


def _as_json(value: float) -> int | float:
    """Return a whole float as an int, as kubectl does when it converts YAML to JSON."""
    if value.is_integer() and abs(value) < _JSON_WRITES_WHOLE_BELOW:
        return int(value)
    return value


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of :data:`_KINDS`, and mappings whose keys are text and unique."""

    yaml_implicit_resolvers = {None: [(_PLAIN + kind, pattern) for kind, pattern in _KINDS.items()]}

    def _error(self, node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
        return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def _refused(self, node: yaml.Node) -> Any:
        cause, remedy = next(found for pattern, found in _REFUSED.items() if re.fullmatch(pattern, node.value))
        if re.fullmatch(r"0[0-7]+", node.value):  # such as defaultMode: 0644
            cause, remedy = "is octal to kubectl", f"write the decimal number {int(node.value, 8)}"
        raise self._error(node, f"{_quote(node.value)} {cause}; put it in quotes{f', or {remedy}' if remedy else ''}")

    def _number(self, node: yaml.Node) -> int | float:
        value = float(node.value)
        if not math.isfinite(value):
            raise self._error(
                node, f"{_quote(node.value)} is too large for a number; put it in quotes, or write a smaller one"
            )
        if not _KINDS["int"].match(node.value):
            return _as_json(value)
        number = int(node.value)
        if number in INT64:
            return number
        if number != value:
            raise self._error(
                node,
                f"{_quote(node.value)} has more than 64 bits, and kubectl rounds it; put it in quotes, or write a "
                "number of fewer digits",
            )
        return _as_json(value)

    def _mapping(self, node: yaml.Node) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, "expected a mapping")
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                key_text = f"{key_node.value!r}" if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise self._error(key_node, f"the key {key_text} is not text; put it in quotes")
            if key in seen:
                raise self._error(key_node, f"the key {key!r} is used twice; keep one")
            seen.add(key)
        return self.construct_mapping(node, deep=True)

    def _unknown_tag(self, node: yaml.Node) -> Any:
        raise self._error(node, f"the tag {node.tag!r} has no meaning in a manifest; remove it")


_Loader.yaml_constructors = {
    None: _Loader._unknown_tag,
    f"{_PLAIN}refused": _Loader._refused,
    f"{_PLAIN}null": lambda loader, node: None,
    f"{_PLAIN}bool": lambda loader, node: node.value.lower() == "true",
    f"{_PLAIN}int": _Loader._number,
    f"{_PLAIN}float": _Loader._number,
    f"{_STANDARD}str": lambda loader, node: loader.construct_scalar(node),
    f"{_STANDARD}seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    f"{_STANDARD}map": _Loader._mapping,
}


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes only text that :func:`read_yaml` would otherwise not read as the same text.

    Text with control or invisible characters is in double quotes: escape_block then changes the notation only.
    """

    yaml_implicit_resolvers = {None: [(_STANDARD + kind, pattern) for kind, pattern in _KINDS.items()]}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def analyze_scalar(self, scalar: str) -> Any:
        analysis = super().analyze_scalar(scalar)
        if escape_block(scalar) != scalar:
            analysis.allow_flow_plain = analysis.allow_block_plain = False
            analysis.allow_single_quoted = analysis.allow_block = False
        return analysis


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(f"{_STANDARD}str", str(text))


def _represent_number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    number = _as_json(float(value)) if isinstance(value, float) or value not in INT64 else value
    if isinstance(number, int):
        return dumper.represent_scalar(f"{_STANDARD}int", repr(number))
    # 1.0e-06 for 1e-06: readers of YAML 1.1, for example PyYAML, read 1e-06 as text.
    mantissa, mark, exponent = repr(number).partition("e")
    mantissa += ".0" if mark and "." not in mantissa else ""
    return dumper.represent_scalar(f"{_STANDARD}float", mantissa + mark + exponent)


Dumper.add_multi_representer(str, _represent_text)
Dumper.add_representer(float, _represent_number)
Dumper.add_representer(int, _represent_number)
