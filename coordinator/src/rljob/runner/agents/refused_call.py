"""Errors of the endpoint, in the shape of OpenAI's API."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


class RefusedCallError(Exception):
    """A call that is refused.

    Clients of OpenAI's API repeat a call that is answered with 408, 409, 429 or 5xx, so none of these is used.

    Args:
        message: one sentence for the author of the program.
        status: of HTTP.
        param: the field of the request that the message is about.
        code: as OpenAI's API names the error.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """Return the error as JSON."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """Return the reply."""
        return Response(self.body(), self.status, media_type="application/json")
