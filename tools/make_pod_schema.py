"""Writes core/src/rljob/api/pod_template.json: the schema of a PodTemplateSpec, without descriptions and `required`.

The source is the models of the Kubernetes client, which has the minor version of the API:

    uv run --no-project --with kubernetes==33.1.0 tools/make_pod_schema.py
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "core" / "src" / "rljob" / "api" / "pod_template.json"
SCALARS = {"str": "string", "datetime": "string", "int": "integer", "float": "number", "bool": "boolean"}
QUANTITIES = {"limits", "requests", "sizeLimit", "divisor", "overhead"}
"""Fields that hold quantities: the API accepts numbers and text there; the client's models have text only."""
INT_OR_STRING = {"x-kubernetes-int-or-string": True}


def main() -> None:
    """Write the file."""
    models = importlib.import_module("kubernetes.client.models")
    definitions: dict[str, Any] = {}
    pending = ["V1PodTemplateSpec"]
    while pending:
        name = pending.pop()
        if name.removeprefix("V1") in definitions:
            continue
        model = getattr(models, name)
        properties = {}
        for attribute, kind in model.openapi_types.items():
            field = model.attribute_map[attribute]
            properties[field] = schema_of(kind, field)
            pending.extend(re.findall(r"V1\w+", kind))
        definitions[name.removeprefix("V1")] = {"type": "object", "properties": properties}
    lines = [f"{json.dumps(name)}: {json.dumps(definitions[name])}" for name in sorted(definitions)]
    TARGET.write_text('{"$ref": "#/$defs/PodTemplateSpec", "$defs": {\n' + ",\n".join(lines) + "\n}}\n")


def schema_of(kind: str, field: str) -> dict[str, Any]:
    """Return the schema of a type as the client's models write it: ``dict(str, V1Thing)``, ``list[str]``, ``int``."""
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        return {"type": "array", "items": schema_of(match[1], field)}
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        return {"type": "object", "additionalProperties": schema_of(match[1], field)}
    if kind.startswith("V1"):
        return {"$ref": f"#/$defs/{kind.removeprefix('V1')}"}
    if kind == "object" or field in QUANTITIES:
        return dict(INT_OR_STRING)
    return {"type": SCALARS[kind]}


if __name__ == "__main__":
    main()
