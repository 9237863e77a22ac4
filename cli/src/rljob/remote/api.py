"""Requests to the API server of a context; errors are sentences with cause and remedy."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator, Mapping

from rljob.kube.access import Access
from rljob.kube.errors import (
    AccessError,
    ApiError,
    ForbiddenError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from rljob.kube.kubeconfig import default_access
from rljob.kube.sync_client import ANSWER_SECONDS, Object, SyncApiClient
from rljob.local.errors import CliError

FIELD_MANAGER = "rljob"
AGENT = "rljob"
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT = 400, 401, 403, 404, 409


class ApiRefusedError(CliError):
    """The API server rejects a request.

    Args:
        cause: its answer.
        sentence: the cause and the remedy.
    """

    def __init__(self, cause: ApiError, sentence: str) -> None:
        super().__init__(sentence, 1 if cause.code >= 500 else 2)
        self.cause = cause

    @property
    def code(self) -> int:
        """HTTP status."""
        return self.cause.code

    @property
    def missing_object(self) -> bool:
        """Whether the resource exists and the object of this name does not."""
        return _names_missing_object(self.cause)


class Api:
    """Client of one API server."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._client = SyncApiClient(access, AGENT)

    @property
    def place(self) -> str:
        """Name of the cluster for messages."""
        return self.access.place

    def get(self, path: str, **query: str) -> Object:
        """Return the object or list at ``path``. Raises as :meth:`request`."""
        return self.request("GET", path, query)

    def patch(self, path: str, body: Object, kind: str, **query: str) -> Object:
        """Patch the object at ``path`` and return it. ``kind``: content type. Raises as :meth:`request`."""
        return self.request("PATCH", path, {"fieldManager": FIELD_MANAGER, **query}, body, kind)

    def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None, kind: str = ""
    ) -> Object:
        """Send a request and return the object in the answer.

        Raises:
            ApiRefusedError: the API server rejects the request.
            CliError: the API server cannot be reached, or there are no credentials.
        """
        with self._translated_errors():
            return self._client.request(method, path, query, body, kind)

    def open(
        self, method: str, path: str, query: Mapping[str, str] | None = None, timeout: float | None = ANSWER_SECONDS
    ) -> http.client.HTTPResponse:
        """Send a request and return the answer; the caller closes it. ``timeout``: seconds without a byte.

        Raises:
            as :meth:`request`.
        """
        with self._translated_errors():
            return self._client.open(method, path, query, timeout=timeout)

    def dial(self) -> socket.socket:
        """Return an open connection (with TLS) for HTTP or an upgrade. Raises as :meth:`request`."""
        with self._translated_errors():
            return self._client.dial()

    def headers(self) -> dict[str, str]:
        """Return the headers of every request. Raises as :meth:`request`."""
        with self._translated_errors():
            return self._client.headers()

    def path(self, path: str) -> str:
        """Return an API path with the prefix of the server's URL."""
        return self._client.path(path)

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translate errors of :mod:`rljob.kube` into CliError."""
        try:
            yield
        except AccessError as error:
            raise CliError(str(error), 2) from None
        except UnavailableError as error:
            if error.code:
                raise self.refusal(error) from None
            raise self.unreachable(error.__cause__ or error) from None
        except ApiError as error:
            raise self.refusal(error) from None

    def unreachable(self, error: BaseException) -> CliError:
        """Return the error for a request without an answer."""
        where = f"the API server {self.access.server} of {self.place}" if self.access.context else self.place
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return CliError(f"{where} is not trusted: {why}; correct certificate-authority-data in the kubeconfig", 2)
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return CliError(f"{where} cannot be reached: {why.lower()}; check that it runs, or choose another --context")

    def refusal(self, error: ApiError) -> ApiRefusedError:
        """Return the error for a rejected request."""
        if isinstance(error, UnauthorizedError):
            sentence = (
                f"{self.place} does not accept the credentials of user {self.access.user}: they have expired or are "
                "wrong; log in again"
            )
        elif isinstance(error, ForbiddenError):
            sentence = f"{self.place} does not allow it: {error.message}; ask its administrator for the right"
        elif isinstance(error, NotFoundError) and not _names_missing_object(error):
            sentence = (
                f"{self.place} does not serve RLJobs; install the chart rljob-crds there, or choose another --context"
            )
        else:
            sentence = f"{self.place} rejects the request: {error.message}"
        return ApiRefusedError(error, sentence)


def _names_missing_object(error: ApiError) -> bool:
    return isinstance(error, NotFoundError) and bool(error.details.get("name"))


def connect(context: str | None) -> Api:
    """Return the API server of a context; None: of the current context, or of the pod that this process runs in.

    Raises:
        CliError: with exit code 2: the context does not exist or cannot be used.
    """
    try:
        return Api(default_access(context or ""))
    except ValueError as error:
        raise CliError(str(error), 2) from None
