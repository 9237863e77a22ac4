"""Requests to the API server of a context. Every refusal is a sentence that says what to do."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import socket
import ssl
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from rljob.kube.access import Access
from rljob.kube.kubeconfig import default_access
from rljob.local.errors import CliError

MANAGER = "rljob"
"""Who owns the fields that the command line sets."""
AGENT = "rljob"
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
TRIES = 3
LONGEST_WAIT_SECONDS = 5.0
"""Of what a server with too much to do may ask for."""
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, TOO_MANY_REQUESTS = 400, 401, 403, 404, 409, 429

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Followed logs may be silent for hours; that the other end is gone is noticed within a minute."""

Object = dict[str, Any]


class ApiError(CliError):
    """The API server refuses.

    Args:
        code: of HTTP.
        status: its Status object; empty when it answers something else.
        sentence: what it refuses and what to do.
    """

    def __init__(self, code: int, status: Object, sentence: str) -> None:
        super().__init__(sentence, 1 if code >= 500 else 2)
        self.code, self.status = code, status

    @property
    def missing_object(self) -> bool:
        """Whether the kind of object is known, and the one that is named is not there."""
        return self.code == NOT_FOUND and bool((self.status.get("details") or {}).get("name"))


class Api:
    """The API server that an access leads to.

    Args:
        access: address and credentials.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self._address = urlsplit(access.server)

    @property
    def place(self) -> str:
        """Which cluster this is, for sentences."""
        return f"context {self.access.context}" if self.access.context else f"the cluster at {self.access.server}"

    def get(self, path: str, **query: str) -> Object:
        """Return what is at ``path``. Raises as :meth:`request`."""
        return self.request("GET", path, query)

    def patch(self, path: str, body: Object, kind: str, **query: str) -> Object:
        """Change what is at ``path`` and return it; ``kind`` is MERGE or APPLY. Raises as :meth:`request`."""
        return self.request("PATCH", path, {"fieldManager": MANAGER, **query}, body, kind)

    def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None, kind: str = ""
    ) -> Object:
        """Do a request and return the object of the answer.

        Raises:
            ApiError: the API server refuses.
            CliError: it cannot be reached, or there are no credentials.
        """
        with self.open(method, path, query, body, kind) as answer:
            try:
                found = json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self.unreachable(error) from None
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
        """Do a request and return the answer, which is to be closed; ``timeout``: between two pieces of it.

        Raises:
            as :meth:`request`.
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
                raise self.unreachable(error) from None
            if tries == TRIES - 1 or not self._again(answer, tries):
                raise self.refusal(answer.status, text)
        raise AssertionError("the last try returns or raises")

    def _again(self, answer: http.client.HTTPResponse, tries: int) -> bool:
        """Whether a refusal may be another answer now; waits where it is to be waited for."""
        if answer.status == UNAUTHORIZED and self.access.plugin is not None and tries == 0:
            self.access.plugin.forget()  # what it gave may have been withdrawn before its end
            return True
        if answer.status != TOO_MANY_REQUESTS:  # which the server did not handle
            return False
        wait = answer.getheader("Retry-After") or "1"
        time.sleep(min(float(wait) if wait.isdecimal() else 1.0, LONGEST_WAIT_SECONDS))
        return True

    def path(self, path: str) -> str:
        """Return a path of the API as the server wants it."""
        return f"{self._address.path.rstrip('/')}{path}"

    def headers(self) -> dict[str, str]:
        """Return the headers of every request.

        Raises:
            CliError: there are no credentials.
        """
        try:
            return {"Accept": "application/json", "User-Agent": AGENT, "Connection": "close", **self.access.headers()}
        except OSError as error:
            raise CliError(f"the token of user {self.access.user} cannot be read: {error}; log in again", 2) from None
        except ValueError as error:
            raise CliError(f"user {self.access.user} of {self.place}: {error}", 2) from None

    # --- connections ---

    def dial(self) -> socket.socket:
        """Return a connection on which HTTP, of any version or upgrade, can be spoken.

        Raises:
            CliError: the API server cannot be reached, or there are no credentials.
        """
        connection = self.connection()
        try:
            self._connect(connection)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self.unreachable(error) from None
        found: socket.socket = connection.sock
        return found

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection that is not made yet."""
        tls = self._security()
        proxy = urlsplit(self._proxy())
        if proxy.scheme not in ("", "http"):
            known = f"{proxy.scheme}://{proxy.hostname}"  # without a password
            raise CliError(f"the proxy {known} cannot be used: only http:// ones can; set proxy-url", 2)
        host, port = self._address.hostname or "", self._address.port or (80 if tls is None else 443)
        near = (proxy.hostname or host, proxy.port or 80) if proxy.scheme else (host, port)
        if tls is None:
            connection = http.client.HTTPConnection(*near, timeout=CONNECT_SECONDS)
        else:
            connection = _Secure(*near, tls, self.access.server_name or host)
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
            raise CliError(f"user {self.access.user} of {self.place}: {error}", 2) from None

    def _proxy(self) -> str:
        """Return the proxy's URL: the kubeconfig's, else the environment's but for this machine, as kubectl does."""
        host = self._address.hostname or ""
        if self.access.proxy or _is_loopback(host) or _is_excepted(host):
            found = self.access.proxy
        else:
            found = urllib.request.getproxies().get(self._address.scheme, "")
        return found if not found or "://" in found else f"http://{found}"

    # --- sentences ---

    def unreachable(self, error: Exception) -> CliError:
        """Return what is said when there is no answer."""
        where = f"the API server {self.access.server} of {self.place}" if self.access.context else self.place
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return CliError(f"{where} is not trusted: {why}; correct certificate-authority-data in the kubeconfig", 2)
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return CliError(f"{where} cannot be reached: {why.lower()}; see that it runs, or choose another --context")

    def refusal(self, code: int, text: bytes) -> ApiError:
        """Return what is said when the server answers ``code`` with ``text``."""
        try:
            status = json.loads(text)
        except ValueError:
            status = {}
        status = status if isinstance(status, dict) and status.get("kind") == "Status" else {}
        message = str(status.get("message") or text[:200].decode(errors="replace").strip() or f"HTTP {code}")
        if code == UNAUTHORIZED:
            sentence = (
                f"{self.place} does not accept the credentials of user {self.access.user}: they have expired or are "
                "wrong; log in again"
            )
        elif code == FORBIDDEN:
            sentence = f"{self.place} does not allow it: {message}; ask its administrator for the right"
        elif code == NOT_FOUND and not (status.get("details") or {}).get("name"):
            sentence = f"{self.place} knows no RLJobs; install the chart rljob-crds there, or choose another --context"
        else:
            sentence = f"{self.place} refuses: {message}"
        return ApiError(code, status, sentence)


class _Secure(http.client.HTTPSConnection):
    """HTTPS whose certificate may be of another name than the host's."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=CONNECT_SECONDS, context=tls)
        self._tls, self._name = tls, name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)  # through a proxy where there is one
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_excepted(host: str) -> bool:
    """Whether NO_PROXY names a host, or the network it is in."""
    if urllib.request.proxy_bypass(host):
        return True
    for entry in urllib.request.getproxies().get("no", "").split(","):
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:  # a name, or no network
            continue
    return False


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


def connect(context: str | None) -> Api:
    """Return the API server of a context: of the current one, or of the pod this runs in, when none is named.

    Raises:
        CliError: with exit code 2: there is no such context, or it cannot be used.
    """
    try:
        return Api(default_access(context or ""))
    except ValueError as error:
        raise CliError(str(error), 2) from None
