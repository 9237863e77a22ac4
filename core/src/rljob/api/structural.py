"""Converts pydantic's JSON schema to a structural schema, the OpenAPI subset of a CustomResourceDefinition.

A structural schema has no references, no unions, one type per value and no closed objects (the API server itself
refuses or drops unknown fields). An unknown keyword is an error, so that no bound of a model is lost on the API server.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from rljob.api import pod_models

Schema: TypeAlias = dict[str, Any]

_ORDER = (
    *("description", "type", "format", "nullable", "default", "enum", "pattern", "minLength", "maxLength"),
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minItems", "maxItems", "maxProperties"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-list-type"),
    *("x-kubernetes-list-map-keys", "x-kubernetes-validations", "required", "items", "additionalProperties"),
    "properties",
)
_KEPT = {"type", "format", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"}
_KEPT |= {"minimum", "maximum"}
_DROPPED = {"examples", "title", "propertyNames", "$defs"}
"""`propertyNames`: a structural schema does not have it; the operator's validation checks the bounds of keys."""


def structural(schema: Schema, definitions: dict[str, Schema], *, defaults: bool) -> Schema:
    """Return the structural schema of ``schema``.

    Args:
        schema: schema of a model or field, by alias.
        definitions: the ``$defs`` of the schema.
        defaults: whether defaults are kept. A nullable field never has a default: a preset or another field governs it,
            and a server-side default could not be distinguished from a user's value.
    """
    found: Schema = {}
    for key, value in schema.items():
        if key in _KEPT:
            found[key] = value
        elif key == "description":
            found[key] = " ".join(value.split())
        elif key in ("exclusiveMinimum", "exclusiveMaximum"):
            found |= {key.replace("exclusiveM", "m"): value, key: True}
        elif key == "const":
            found["enum"] = [value]
        elif key == "$ref":
            target = structural(definitions[value.rpartition("/")[2]], definitions, defaults=defaults)
            found = target | found
        elif key == "anyOf":
            kind, null = value
            assert null == {"type": "null"}, f"a union besides null: {value}"
            found = structural(kind, definitions, defaults=defaults) | found
            # The API server refuses null in an enum. It drops null from a field that is not nullable and has no
            # default, which has the same effect.
            found |= {} if "enum" in found else {"nullable": True}
        elif key == "prefixItems":
            assert all(item == value[0] for item in value), f"a tuple of several types: {value}"
            found["items"] = structural(value[0], definitions, defaults=defaults)
        elif key == "items":
            found["items"] = structural(value, definitions, defaults=defaults)
        elif key == "properties":
            found["properties"] = {
                name: structural(field, definitions, defaults=defaults) for name, field in value.items()
            }
        elif key == "patternProperties":  # a CEL rule checks the keys
            (inner,) = value.values()
            found["additionalProperties"] = structural(inner, definitions, defaults=False)
        elif key == "additionalProperties":
            found |= _additional(value, definitions)
        elif key == "required":
            found["required"] = value
        elif key == pod_models.MARK:
            found |= pod_template()
        else:
            assert key in {"default", *_DROPPED}, f"no structural schema has {key} (of {schema.get('title', '')})"
    if defaults and schema.get("default") is not None:
        found["default"] = _without_null(schema["default"])
    return ordered(_listed(found))


def ordered(schema: Schema) -> Schema:
    """Return ``schema`` with its keywords in the order of :data:`_ORDER`."""
    return {key: schema[key] for key in sorted(schema, key=_ORDER.index)}


def pod_template() -> Schema:
    """Return the structural schema of a PodTemplateSpec. Only keys of lists are required; any other field except
    restartPolicy may be null, which deletes it."""
    return _inlined(pod_models.SCHEMA, "template")


def _additional(value: Any, definitions: dict[str, Schema]) -> Schema:
    if value is False:  # closed by the API server
        return {}
    if value is True:
        return {"x-kubernetes-preserve-unknown-fields": True}
    return {"additionalProperties": structural(value, definitions, defaults=False)}


def _without_null(value: Any) -> Any:
    """Return a default without null fields. Defaults are complete, because CEL rules are evaluated on them."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return value


def _listed(schema: Schema) -> Schema:
    """Return ``schema`` with the list-map keywords that server-side apply needs."""
    if schema.get("type") != "array" or "x-kubernetes-list-type" in schema:
        return schema
    required = schema["items"].get("required", [])
    key = next((key for key in ("name", "type") if key in required), None)
    if key is None:
        return schema | {"x-kubernetes-list-type": "atomic"}
    return schema | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _inlined(schema: Schema, field: str) -> Schema:
    """Return a schema of pod_template.json with its references resolved. ``field``: name of the schema's field."""
    if "$ref" in schema:
        schema = pod_models.SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    found = dict(schema)
    if "type" not in found:
        return found
    if "items" in found:
        found["items"] = _inlined(found["items"], "")
        if key := pod_models.LIST_KEYS.get(field):
            found["items"] = _with_key(found["items"], key)
            found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    if "additionalProperties" in found:
        found["additionalProperties"] = _deletable(_inlined(found["additionalProperties"], ""))
    if "properties" in found:
        found["properties"] = {
            name: _deletable(_inlined(inner, name), name) for name, inner in found["properties"].items()
        }
    return ordered(found)


def _deletable(schema: Schema, field: str = "") -> Schema:
    """Return the schema of a field, nullable unless rljob governs the field. Null deletes a field."""
    return schema if field == "restartPolicy" else ordered(schema | {"nullable": True})


def _with_key(item: Schema, key: str) -> Schema:
    """Return an item of a list map, whose key is required and never null."""
    properties = dict(item["properties"])
    properties[key] = {keyword: value for keyword, value in properties[key].items() if keyword != "nullable"}
    return ordered(item | {"required": [key], "properties": properties})
