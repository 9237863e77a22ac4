"""TLS for an HTTP server, with the server's limits from the first byte of a connection.

uvicorn sees a connection only after its TLS handshake, and asyncio waits for a handshake for a minute. Here the
connection is counted when it is accepted, and the handshake has a deadline. The option of the server is
``http=functools.partial(TlsProtocol, ServerCertificate(certificate, key))``.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, cast

from rljob.protocol.http_server import HttpProtocol

log = logging.getLogger(__name__)

INCOMPLETE_HANDSHAKE = "incomplete TLS handshake"
FAILED_HANDSHAKE = "failed TLS handshake"


class ServerCertificate:
    """Certificate and key of a server in PEM files, which are read again when they change.

    Raises:
        ValueError: the files cannot be read or do not fit together.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._version = self._files()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Files that cannot be read leave the last certificate in use."""
        version = self._files()
        if version != self._version:
            self._version = version
            try:
                self._context = self._read()
            except ValueError as error:
                log.error("%s; the last certificate stays in use", error)
            else:
                log.info("read the renewed certificate %s", self._certificate)
        return self._context

    def _files(self) -> tuple[int, ...]:
        """Return values that change when a file is replaced; () if one is missing."""
        try:
            found = [path.stat() for path in (self._certificate, self._key)]
        except OSError:
            return ()
        return tuple(value for each in found for value in (each.st_ino, each.st_mtime_ns, each.st_size))

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._certificate, self._key)
        except OSError as error:  # errors of ssl are OSErrors
            files = f"{self._certificate} and {self._key}"
            raise ValueError(f"{files}: no certificate with its key: {error.strerror or error}") from None
        return context


class TlsProtocol(HttpProtocol):
    """One connection with TLS. It counts as a connection, and has a deadline, from the start of its handshake.

    Args:
        certificate: of the server.
        options: of :class:`~rljob.protocol.http_server.HttpProtocol`.
    """

    def __init__(self, certificate: ServerCertificate, **options: Any) -> None:
        super().__init__(**options)
        self._certificate = certificate
        self._serves = False
        self._early = b""
        """Data of the first request, which may arrive before the end of the handshake is handled."""
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake and its deadline."""
        plain = cast("asyncio.Transport", transport)
        self.connection.opened(plain)
        self.connection.set_deadline(self.connection.limits.head_seconds, INCOMPLETE_HANDSHAKE)
        self._handshake = asyncio.get_running_loop().create_task(self._start(plain))

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        if self._serves:
            super().data_received(data)
        else:
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection."""
        if self._serves:
            super().connection_lost(exc)
        else:
            self.connection.closed()

    async def _start(self, plain: asyncio.Transport) -> None:
        """Run the handshake, then serve the connection."""
        loop, transport = asyncio.get_running_loop(), None
        context, seconds = self._certificate.context(), self.connection.limits.drain_seconds
        try:  # the time is for the peer's answer to the end of TLS, for which asyncio waits 30 s
            transport = await loop.start_tls(plain, self, context, server_side=True, ssl_shutdown_timeout=seconds)
        except OSError:  # of the peer: it speaks no TLS, or does not trust the certificate
            self.connection.count(FAILED_HANDSHAKE)
        if transport is None or plain.is_closing():  # the connection was lost, or closed at its deadline
            plain.abort()
            self.connection.closed()
            return
        self._serves = True
        super().connection_made(transport)
        early, self._early = self._early, b""
        if early:
            super().data_received(early)
