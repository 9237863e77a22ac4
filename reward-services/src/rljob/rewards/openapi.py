"""The OpenAPI document of the HTTP protocol of rewards: docs/reward-openapi.json. `make docs` writes it.

The types are those of :mod:`rljob.protocol.score_messages`. The path has the version of the protocol: a change that old
runners or old services do not accept gets another path. New fields have defaults and are no such change.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from rljob.protocol.score_messages import MAX_ITEMS, ScoreReply, ScoreRequest

VERSION = "1.3.0"
"""Major: the path. Minor: fields were added. 1.1: response_tokens and metadata. 1.2: deterministic, in the reply.
1.3: response_token_ids."""
TEXT = {"text/plain": {"schema": {"type": "string"}}}
REFUSALS = {
    "400": "The body is incomplete.",
    "401": "The token is missing or wrong. A service that rljob starts may require RLJOB_TOKEN.",
    "413": "A bound is exceeded. The runner does not repeat the request.",
    "429": "Too many samples wait for a worker. Repeat the request after Retry-After seconds.",
    "503": "No worker is set up. Repeat the request after Retry-After seconds.",
    "422": "The body is not a ScoreRequest. The runner sends each sample by itself.",
}
PROBES = {
    "/healthz": {"200": "The process is alive"},
    "/readyz": {"200": "A worker is set up", "503": "No worker is set up"},
    "/metrics": {"200": "Metrics for Prometheus"},
}


def document() -> dict[str, Any]:
    """Return the document."""
    (request, reply), components = msgspec.json.schema_components(
        [ScoreRequest, ScoreReply], ref_template="#/components/schemas/{name}"
    )
    score = {
        "summary": "Score samples",
        "description": f"At most {MAX_ITEMS} samples. The scores have the order of the samples. A sample that "
        "cannot be scored has an error; it counts as 0 only if the manifest says so. The runner repeats a request "
        "after 408, 425, 429 and every status above 500, not before Retry-After.",
        "security": [{}, {"token": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {"description": "The scores.", "content": {"application/json": {"schema": reply}}},
            **{status: {"description": why, "content": TEXT} for status, why in REFUSALS.items()},
        },
    }
    probes = {
        path: {
            "get": {
                "summary": answers["200"],
                "responses": {status: {"description": what, "content": TEXT} for status, what in answers.items()},
            }
        }
        for path, answers in PROBES.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Reward of rljob", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": {"/v1/score": {"post": score}, **probes},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")
