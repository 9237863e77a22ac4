"""The OpenAPI document of the session protocol of environments: docs/environment-openapi.json. `make docs` writes it.

The types are those of :mod:`rljob.protocol.episode_messages`. The path has the version of the protocol: a change that
old runners or old services do not accept gets another path. New fields have defaults and are no such change.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from rljob.protocol.episode_messages import SESSION_PATTERN, Observation, OpenSession, StepRequest

VERSION = "1.0.0"
"""Major: the path. Minor: fields were added."""
TEXT = {"text/plain": {"schema": {"type": "string"}}}
REFUSALS = {
    "400": "The body is incomplete.",
    "401": "The token is missing or wrong. A service that rljob starts may require RLJOB_TOKEN.",
    "404": "There is no such session: it has expired, was closed, or the service was restarted. The sample fails.",
    "409": "The name is in use, the number of the step is not the next one, or the episode has ended.",
    "413": "A bound is exceeded.",
    "422": "The body is not what the path requires.",
    "429": "There are too many sessions. Repeat the request after Retry-After seconds.",
    "500": "The environment raised or returned something invalid. The episode has ended; the sample fails.",
    "504": "The environment exceeded the time limit. The episode has ended; the sample fails.",
}
REPEATED = (
    "A request that is repeated gets the reply of the first one and has no second effect. A client repeats a request "
    "whose reply it did not receive, and after 408, 425, 429, 502 and 503."
)


def document() -> dict[str, Any]:
    """Return the document."""
    (opening, step, observation), components = msgspec.json.schema_components(
        [OpenSession, StepRequest, Observation], ref_template="#/components/schemas/{name}"
    )
    session = {
        "name": "session",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": SESSION_PATTERN},
        "description": "Name that the client chose.",
    }
    paths = {
        "/v1/sessions": {
            "post": _operation("Start an episode", f"The reply is step 0. {REPEATED}", opening, observation)
        },
        "/v1/sessions/{session}/steps": {
            "parameters": [session],
            "post": _operation("Make a step", f"Steps are numbered from 1. {REPEATED}", step, observation),
        },
        "/v1/sessions/{session}": {
            "parameters": [session],
            "delete": _operation("End an episode", "A session that does not exist is ended already.", None, {}),
        },
        **{
            path: {"get": {"summary": summary, "responses": {"200": {"description": summary, "content": TEXT}}}}
            for path, summary in (
                ("/healthz", "The process is alive"),
                ("/readyz", "The environment is loaded"),
                ("/metrics", "Metrics for Prometheus"),
            )
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Environment of rljob", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(summary: str, description: str, body: Any, reply: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "description": description, "security": [{}, {"token": []}]}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    operation["responses"] = {
        "200": {"description": "Done.", "content": {"application/json": {"schema": reply}}},
        **{status: {"description": why, "content": TEXT} for status, why in REFUSALS.items()},
    }
    return operation


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")
