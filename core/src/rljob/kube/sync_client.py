"""Synchronous client of the Kubernetes API (http.client) for short-lived programs. It imports in milliseconds.

Each request has its own connection. Proxies are used as kubectl uses them.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from rljob.kube.access import Access
from rljob.kube.errors import AccessError, ApiError, TooManyRequestsError, UnauthorizedError, UnavailableError, error_of
from rljob.kube.proxies import proxy_of

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
TRIES = 3
MAX_RETRY_SECONDS = 5.0
"""Upper bound of Retry-After."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Followed logs may have no output for hours. TCP keepalive detects a lost peer within a minute."""

Object = dict[str, Any]


class SyncApiClient:
    """Requests to the API server of an access. ``agent``: value of the header User-Agent."""

    def __init__(self, access: Access, agent: str) -> None:
        self.access = access
        self._agent = agent
        self._address = urlsplit(access.server)

    def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None, kind: str = ""
    ) -> Object:
        """Send a request and return the object in the response. ``kind``: content type of ``body``.

        Raises:
            ApiError: the API server refuses the request; UnavailableError if there is no response.
            AccessError: there are no usable credentials.
        """
        with self.open(method, path, query, body, kind) as answer:
            try:
                found = json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise unavailable(error) from error
        assert isinstance(found, dict), "objects and lists are mappings"
        return found

    def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        kind: str = "",
        timeout: float | None = ANSWER_SECONDS,
    ) -> http.client.HTTPResponse:
        """Send a request and return the response, which the caller closes. ``timeout``: maximum seconds without a byte.

        Raises:
            ApiError, AccessError: as :meth:`request`.
        """
        url = f"{self.path(path)}?{urlencode(query)}" if query else self.path(path)
        data = None if body is None else json.dumps(body).encode()
        for tries in range(TRIES):
            headers = self.headers() | ({"Content-Type": kind} if kind else {})
            connection = self.connection()
            try:
                self._connect(connection)
                connection.sock.settimeout(timeout)
                connection.request(method, url, data, headers)
                answer = connection.getresponse()
                if answer.status < http.HTTPStatus.BAD_REQUEST:
                    return answer
                with answer:
                    text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise unavailable(error) from error
            refused = error_of(answer.status, text, answer.getheader("Retry-After"))
            if tries == TRIES - 1 or not self._may_retry(refused, tries):
                raise refused
        raise AssertionError("the last try returns or raises")

    def _may_retry(self, refused: ApiError, tries: int) -> bool:
        """Return whether a retry may succeed. Before the retry of a 429, sleep for Retry-After or 1 s, at
        most MAX_RETRY_SECONDS."""
        if isinstance(refused, UnauthorizedError) and self.access.plugin is not None and tries == 0:
            self.access.forget_credentials()  # the credentials may have been revoked before they expired
            return True
        if not isinstance(refused, TooManyRequestsError):  # any other request may have been executed
            return False
        time.sleep(min(refused.retry_after or 1.0, MAX_RETRY_SECONDS))
        return True

    def path(self, path: str) -> str:
        """Return an API path with the prefix of the server's URL."""
        return f"{self._address.path.rstrip('/')}{path}"

    def headers(self) -> dict[str, str]:
        """Return the headers of every request.

        Raises:
            AccessError: there are no credentials.
        """
        try:
            return {"Accept": "application/json", "User-Agent": self._agent, "Connection": "close"} | (
                self.access.headers()
            )
        except OSError as error:
            raise AccessError(f"the token of user {self.access.user} cannot be read: {error}; log in again") from None
        except ValueError as error:
            raise AccessError(f"user {self.access.user} of {self.access.place}: {error}") from None

    def dial(self) -> socket.socket:
        """Return an open connection (with TLS), on which the caller uses HTTP or upgrades to another protocol.

        Raises:
            UnavailableError: the API server cannot be reached.
            AccessError: there are no usable credentials.
        """
        connection = self.connection()
        try:
            self._connect(connection)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise unavailable(error) from error
        found: socket.socket = connection.sock
        return found

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection that is not open yet.

        Raises:
            AccessError: the proxy is not supported, or the client certificate cannot be used.
        """
        tls = self._security()
        proxy = urlsplit(proxy_of(self.access))
        if proxy.scheme not in ("", "http"):
            known = f"{proxy.scheme}://{proxy.hostname}"  # without a password
            raise AccessError(f"the proxy {known} is not supported; set proxy-url to an http:// proxy")
        host, port = self._address.hostname or "", self._address.port or (80 if tls is None else 443)
        peer = (proxy.hostname or host, proxy.port or 80) if proxy.scheme else (host, port)
        if tls is None:
            connection = http.client.HTTPConnection(*peer, timeout=CONNECT_SECONDS)
        else:
            connection = _NamedHTTPSConnection(*peer, tls, self.access.server_name or host)
        if proxy.scheme:
            connection.set_tunnel(host, port, _authorization(proxy))
        return connection

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def _security(self) -> ssl.SSLContext | None:
        try:
            return self.access.security()
        except (OSError, ValueError) as error:
            raise AccessError(f"user {self.access.user} of {self.access.place}: {error}") from None


def unavailable(error: Exception) -> UnavailableError:
    """Return the error for a failed connection. The caller raises it ``from`` the cause."""
    return UnavailableError(0, "", f"no answer from the API server: {error or type(error).__name__}")


class _NamedHTTPSConnection(http.client.HTTPSConnection):
    """HTTPS connection that expects a certificate for ``name``, which may differ from the host."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=CONNECT_SECONDS, context=tls)
        self._tls, self._name = tls, name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)  # through the proxy if there is one
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
