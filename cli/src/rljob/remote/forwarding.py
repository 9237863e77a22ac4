"""HTTP to a port of a pod, through the API server: what `kubectl port-forward` does, without a port on this machine.

The API server carries bytes in frames of a WebSocket. The first byte of a frame is its channel: 0 is the connection, 1
says what goes wrong with it; the first frame of each repeats the port. Source: Kubernetes'
k8s.io/cri-streaming/pkg/streaming/portforward/websocket.go, protocol v4.channel.k8s.io.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import time
from typing import Any
from urllib.parse import urlencode, urlsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from rljob.kube.errors import error_of
from rljob.kube.resource_kinds import PODS
from rljob.kube.sync_client import ANSWER_SECONDS
from rljob.local.errors import CliError
from rljob.remote.api import Api

PROTOCOL = Subprotocol("v4.channel.k8s.io")
DATA, ERROR = b"\0", b"\1"
PORT_BYTES = 2
SILENCE_SECONDS = 60.0
"""Longest time without a byte: what takes longer says so with spaces."""
BROKEN_OFF = (OSError, EOFError, ConnectionClosed)
"""What a connection that ends before its WebSocket is there raises, by where it ends."""
HANDSHAKE_TRIES = 4
"""An API server with too much to do breaks the beginning of a forwarded port off."""
HANDSHAKE_PAUSE_SECONDS = 0.5
"""Before the second try; twice as long before each one after it."""


class ForwardError(CliError):
    """The pod cannot be spoken to: the port is not open, the node does not answer, or the connection broke off."""


class HandshakeError(ForwardError):
    """The API server can be reached, and does not forward the port."""


class Tunnel:
    """A connection to a port of a pod; what :mod:`http.client` wants of a socket. ``patience``: seconds without a byte.

    Raises:
        ApiRefusedError: the API server refuses.
        HandshakeError: it does not forward the port, at several tries.
        CliError: it cannot be reached.
    """

    def __init__(self, api: Api, namespace: str, pod: str, port: int, patience: float) -> None:
        self._pod, self._patience = pod, patience
        self._socket = _forwarded(api, namespace, pod, port)
        self._headers = {DATA: 0, ERROR: 0}  # bytes of the port's number that came

    def sendall(self, data: Any) -> None:
        """Send bytes."""
        try:
            self._socket.send(DATA + bytes(data))
        except ConnectionClosed:
            self.receive()  # an error may have arrived before
            raise ForwardError(f"the connection to pod {self._pod} broke off; try again") from None

    def receive(self) -> bytes:
        """Return the bytes that come next; none when the other side has closed."""
        while True:
            try:
                frame = self._socket.recv(self._patience, decode=False)
            except TimeoutError:
                raise ForwardError(f"pod {self._pod} sent nothing for {self._patience:.0f} s; try again") from None
            except ConnectionClosed:
                return b""
            assert isinstance(frame, bytes), "frames are asked for as bytes"
            channel, data = frame[:1], frame[1:]
            if channel not in self._headers:
                continue
            skipped = min(PORT_BYTES - self._headers[channel], len(data))
            self._headers[channel] += skipped
            data = data[skipped:]
            if data and channel == ERROR:
                raise ForwardError(f"pod {self._pod} cannot be spoken to: {data.decode(errors='replace').strip()}")
            if data:
                return data

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the received data as a file; closing it closes the connection."""
        assert mode == "rb", "http.client reads so"
        return io.BufferedReader(_Received(self), 1 << 16)

    def close(self) -> None:
        """Do nothing: http.client closes its socket while the answer is still being read."""

    def end(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError, ConnectionClosed):
            self._socket.close()


class _Received(io.RawIOBase):
    """What a tunnel receives."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest or self._tunnel.receive()
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._rest = data[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._tunnel.end()
        super().close()


def _forwarded(api: Api, namespace: str, pod: str, port: int) -> ClientConnection:
    """Return the WebSocket that a port is forwarded through; raises as :class:`Tunnel`."""
    why = ""
    for tries in range(HANDSHAKE_TRIES):
        if tries:
            time.sleep(HANDSHAKE_PAUSE_SECONDS * 2 ** (tries - 1))
        try:
            return _shaken(api, namespace, pod, port)
        except (*BROKEN_OFF, InvalidHandshake) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):  # long enough once
                break
    raise HandshakeError(f"port {port} of pod {pod} is not forwarded: {why}; try again")


def _shaken(api: Api, namespace: str, pod: str, port: int) -> ClientConnection:
    """Try once."""
    path = f"{PODS.path(namespace, pod, 'portforward')}?{urlencode({'ports': port})}"
    headers = {name: value for name, value in api.headers().items() if name not in ("Connection", "Accept")}
    agent = headers.pop("User-Agent")
    sock = api.dial()  # with TLS where there is any: to websockets it is a plain connection
    try:
        return connect(
            f"ws://{urlsplit(api.access.server).netloc}{api.path(path)}",
            sock=sock,
            subprotocols=[PROTOCOL],
            compression=None,
            additional_headers=headers,
            user_agent_header=agent,
            open_timeout=ANSWER_SECONDS,
            ping_interval=None,
            max_size=None,
            proxy=None,
        )
    except InvalidStatus as error:
        sock.close()
        raise api.refusal(error_of(error.response.status_code, bytes(error.response.body or b""))) from None
    except (*BROKEN_OFF, InvalidHandshake):
        sock.close()
        raise


def get(
    api: Api, namespace: str, pod: str, port: int, path: str, patience: float = SILENCE_SECONDS
) -> http.client.HTTPResponse:
    """Return the answer to a GET of ``path``, whatever its status; it is to be closed.

    Args:
        api: of the cluster.
        namespace: of the pod.
        pod: whose port it is.
        port: number.
        path: with its query.
        patience: seconds, between two pieces of the answer.

    Raises:
        ApiRefusedError: the API server refuses to forward.
        ForwardError: the pod does not answer.
        CliError: the API server cannot be reached.
    """
    tunnel = Tunnel(api, namespace, pod, port, patience)
    connection = http.client.HTTPConnection(pod, port)
    connection.sock = tunnel
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse()
    except http.client.HTTPException as error:
        tunnel.end()
        why = str(error) or type(error).__name__
        raise ForwardError(f"pod {pod} gives no answer: {why.lower()}; try again") from None
    except BaseException:  # including Ctrl-C: the WebSocket is closed whatever happened
        tunnel.end()
        raise
