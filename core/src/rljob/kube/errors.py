"""Errors of requests to the Kubernetes API. Each class stands for one reaction of a caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

LONGEST_TEXT = 200
"""Maximum length of the message if a response is not a Status, in characters."""


class ApiError(Exception):
    """The API server refused a request, or did not answer.

    Args:
        code: HTTP status; 0 if there is no response.
        reason: reason of the Status, for example AlreadyExists.
        message: message of the Status.
        retry_after: value of Retry-After in seconds; 0 if the response has none.
        details: details of the Status.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        retry_after: float = 0.0,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{message} ({code} {reason})" if code else message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after
        self.details: Mapping[str, Any] = details or {}


class UnauthorizedError(ApiError):
    """The API server does not accept the credentials."""


class NotFoundError(ApiError):
    """The object does not exist."""


class ConflictError(ApiError):
    """The object has changed, or another object has its name."""


class AlreadyExistsError(ApiError):
    """An object of this name exists."""


class GoneError(ApiError):
    """The resource version is too old to watch from."""


class InvalidError(ApiError):
    """The object violates rules of the API server or of an admission policy."""


class ForbiddenError(ApiError):
    """Not allowed: a quota, an admission controller or missing rights."""


class TooManyRequestsError(ApiError):
    """The API server is overloaded; it did not handle the request."""


class UnavailableError(ApiError):
    """There is no response, or a server error. The request may have been executed or not."""


class AccessError(Exception):
    """No request can be sent: credentials cannot be read, or the proxy is not supported."""


REFUSALS = (InvalidError, ForbiddenError)
"""The same request fails again until a user changes something."""

_BY_CODE: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    422: InvalidError,
    429: TooManyRequestsError,
}


class _Status(msgspec.Struct):
    message: str | None = None
    reason: str | None = None
    details: dict[str, Any] | None = None


def error_of(code: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """Return the error for a response.

    Args:
        code: HTTP status of at least 400, or the code of an ERROR event of a watch.
        body: body of the response, usually a Status; any text if a proxy sent the response.
        retry_after: value of the header Retry-After, in seconds.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError:
        status = _Status(body[:LONGEST_TEXT].decode(errors="replace").strip())
    reason = status.reason or ""
    kind = AlreadyExistsError if reason == "AlreadyExists" else _BY_CODE.get(code)
    if kind is None:
        kind = UnavailableError if code >= 500 else ApiError
    wait = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
    return kind(code, reason, status.message or f"the API server answers {code}", wait, status.details)
