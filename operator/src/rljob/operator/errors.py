"""How a request to the Kubernetes API ends badly, and what kind of failure that is."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """The API server's answer is a refusal, or there is no answer.

    ``code``: HTTP status; 0 when no answer came. ``reason``: Kubernetes' word for it. ``message``: its sentence.
    ``retry_after``: seconds the server asks to wait; 0 when it says nothing.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{message} ({code} {reason})" if code else message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after


class NotFoundError(ApiError):
    """There is no such object."""


class ConflictError(ApiError):
    """The object has changed, or is not the one that was meant."""


class AlreadyExistsError(ApiError):
    """There is an object of this name."""


class GoneError(ApiError):
    """The resource version is too old to go on from."""


class InvalidError(ApiError):
    """The object is wrong by the API server's or an admission policy's rules."""


class ForbiddenError(ApiError):
    """Not allowed: a quota, an admission controller or missing rights."""


class TooManyRequestsError(ApiError):
    """The API server has too much to do; the request was not handled."""


class UnavailableError(ApiError):
    """No answer, or an error of the server: whether the request was done is unknown."""


class FencedError(Exception):
    """A write was about to be made by an operator that is not the leader any more."""


REFUSALS = (InvalidError, ForbiddenError)
"""Saying the same again will be answered the same, until somebody changes something."""

_BY_CODE: dict[int, type[ApiError]] = {
    400: InvalidError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    422: InvalidError,
    429: TooManyRequestsError,
}


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""


def error_of(code: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """Return the error that an answer stands for.

    Args:
        code: HTTP status of at least 400, or the code of an ERROR event of a watch.
        body: the answer: a Status as a rule, anything if a proxy made it.
        retry_after: the header, in seconds.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError:
        status = _Status(body[:200].decode(errors="replace"))
    kind = AlreadyExistsError if status.reason == "AlreadyExists" else _BY_CODE.get(code)
    wait = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
    message = status.message or f"the API server answers {code}"
    if kind is None:
        kind = UnavailableError if code >= 500 else ApiError
    return kind(code, status.reason, message, wait)
