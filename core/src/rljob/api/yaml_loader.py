"""YAML as kubectl reads it: the same text gives the same values under ``rljob run`` and under ``kubectl apply``.

kubectl reads with sigs.k8s.io/yaml, which resolves plain scalars by goyaml.v2's rules (its resolve.go) and passes them
on as JSON. So ``3e-4`` and ``1e3`` are numbers (the second a whole one), ``0x10``, ``0b11``, ``017`` and ``1_000`` are
whole numbers, a date is text, keys are unique. Of one thing kubectl makes a trap: to it a bare ``on``, ``yes`` or ``y``
is true. Here it is a :class:`BareWord`, text wherever a field wants text; where any value is allowed, and the two
readings would silently differ, the manifest is refused.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = "tag:rljob.dev,2026:plain"
_DEFAULT_TAGS: dict[type[yaml.Node], str] = {
    yaml.ScalarNode: "tag:yaml.org,2002:str",
    yaml.SequenceNode: "tag:yaml.org,2002:seq",
    yaml.MappingNode: "tag:yaml.org,2002:map",
}
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_BARE_WORDS = frozenset(
    form for word in ("y", "yes", "on", "n", "no", "off") for form in (word, word.capitalize(), word.upper())
)
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_POINT_FIRST = re.compile(r"\.[0-9]+(_[0-9]+)*([eE][-+]?[0-9]+(_[0-9]+)*)?")  # goyaml leaves these to Go's ParseFloat
_WHOLE = (-(2**63), 2**63 - 1)  # other whole numbers are floats to Kubernetes
_JSON_WRITES_WHOLE_BELOW = 1e21  # Go's encoding/json writes a whole float below this without a point


class BareWord(str):
    """An unquoted on, off, yes, no, y or n."""


class YamlError(ValueError):
    """The text is not YAML that kubectl would take. The message is a sentence with line and column where known."""


def scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar: None, bool, int, float, BareWord or str."""
    if text in _WORDS:
        return _WORDS[text]
    if text in _BARE_WORDS:
        return BareWord(text)
    if text[0] == ".":
        return _float(text.replace("_", ""), text) if _POINT_FIRST.fullmatch(text) else text
    if text[0] in "+-0123456789":
        number = text.replace("_", "")
        if match := _INTEGER.fullmatch(number):
            return _integer(number, match[1], text)
        if _FLOAT.fullmatch(number):
            return _float(number, text)
    return text


def _integer(number: str, digits: str, text: str) -> int | float | str:
    octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    size = int(digits, 8) if octal else int(digits, 0)
    value = -size if number[0] == "-" else size
    if _WHOLE[0] <= value <= _WHOLE[1]:
        return value
    if value < 2**64 and number[0].isdigit():
        return _as_json(float(value))  # fits into goyaml's unsigned number, and then into no whole one of Kubernetes
    return _float(number, text) if _FLOAT.fullmatch(number) else text  # and an octal one has become a decimal one


def _float(number: str, text: str) -> int | float | str:
    value = float(number)
    return _as_json(value) if math.isfinite(value) else text


def _as_json(value: float) -> int | float:
    """Return a whole float as an int, as kubectl does on its way through JSON."""
    if value.is_integer() and abs(value) < _JSON_WRITES_WHOLE_BELOW:
        return int(value)
    return value


def read_yaml(text: str) -> Any:
    """Return the one document of ``text`` as dicts with text keys, lists, and values of :func:`scalar`.

    Raises:
        YamlError: not YAML, no document or several, a key twice, a tag or value that JSON cannot hold, or too much.
    """
    if len(text.encode()) > MAX_BYTES:
        raise YamlError(f"the text is longer than {MAX_BYTES:,} bytes, the most that a manifest may have")
    try:
        data = yaml.load(text, _Loader)  # a subclass of SafeLoader
        _check(data)
        return _unshared(data)
    except yaml.MarkedYAMLError as error:
        raise YamlError(_sentence(error)) from None
    except yaml.YAMLError as error:
        raise YamlError(f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise YamlError("the text is nested too deeply to be a manifest") from None


def write_yaml(data: Any) -> str:
    """Return YAML which :func:`read_yaml` reads as ``data``."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _sentence(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if "expected a single document" in (error.context or ""):
        return f"{where}a second document begins; keep one RLJob in a file"
    if "recursive" in (error.problem or ""):
        return f"{where}an anchor contains an alias of itself, so the text has no end; write the values out"
    return where + " ".join(filter(None, (error.context, error.problem)))


def _check(data: Any) -> None:
    """Refuse what JSON cannot hold, and aliases that make a small text large."""
    pending, seen = [data], 0
    while pending:
        value = pending.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise YamlError(f"there are more than {MAX_VALUES:,} values once aliases are expanded")
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise YamlError("a value is infinite or not a number, which a manifest cannot hold; write a number")


def _unshared(data: Any) -> Any:
    """Return a copy in which what an alias repeats is there several times: one can be changed without the others."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_unshared(value) for value in data]
    return data


class _Loader(yaml.SafeLoader):
    """SafeLoader with kubectl's scalars and mappings whose keys are text and occur once."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return _MERGE if value == "<<" else _PLAIN
        return _DEFAULT_TAGS[kind]

    def _plain(self, node: yaml.Node) -> Any:
        return scalar(str(node.value))

    def _mapping(self, node: yaml.Node) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node)
            if not isinstance(key, str) or isinstance(key, BareWord):
                shown = f"{key_node.value!r}" if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {shown} is not text; put it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return self.construct_mapping(node, deep=True)

    def _refuse(self, node: yaml.Node) -> Any:
        raise yaml.constructor.ConstructorError(
            None, None, f"the tag {node.tag!r} has no meaning in a manifest; remove it", node.start_mark
        )

    def _text(self, node: yaml.Node) -> str:
        return str(node.value)


_Loader.yaml_constructors = {
    None: _Loader._refuse,
    _PLAIN: _Loader._plain,
    _MERGE: _Loader._text,  # as a value
    "tag:yaml.org,2002:str": _Loader._text,
    "tag:yaml.org,2002:timestamp": _Loader._text,
    "tag:yaml.org,2002:seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    "tag:yaml.org,2002:map": _Loader._mapping,
}


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes exactly the text which :func:`scalar` would not read as itself."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            read = scalar(value) if value != "<<" else None
            if isinstance(read, BareWord):
                return _PLAIN
            kinds = {str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
            return f"tag:yaml.org,2002:{kinds[type(read)]}"
        return _DEFAULT_TAGS[kind]

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text))


def _represent_number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    number = _as_json(float(value)) if isinstance(value, float) or not _WHOLE[0] <= value <= _WHOLE[1] else value
    if isinstance(number, int):
        return dumper.represent_scalar("tag:yaml.org,2002:int", repr(number))
    # 1.0e-06 for 1e-06: to readers of YAML 1.1, Python's among them, the latter is text.
    mantissa, mark, exponent = repr(number).partition("e")
    mantissa += ".0" if mark and "." not in mantissa else ""
    return dumper.represent_scalar("tag:yaml.org,2002:float", mantissa + mark + exponent)


Dumper.add_multi_representer(str, _represent_text)
Dumper.add_representer(float, _represent_number)
Dumper.add_representer(int, _represent_number)
