"""HTTP to a port of a pod, through the API server: as `kubectl port-forward`, without a port on this machine.

The API server carries bytes in frames of a WebSocket. The first byte of a frame is its channel: 0 carries the data, 1
carries error messages; the first frame of each channel repeats the port. Source: Kubernetes'
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
"""Longest time without a byte: slow endpoints send spaces meanwhile."""
CONNECTION_ERRORS = (OSError, EOFError, ConnectionClosed)
"""Exceptions of a connection that ends before its WebSocket is established, depending on when it ends."""
HANDSHAKE_TRIES = 4
"""An overloaded API server closes a connection during the handshake."""
HANDSHAKE_PAUSE_SECONDS = 0.5
"""Pause before the second try; doubled before each later try."""


class ForwardError(CliError):
    """Forwarding failed: the port is not open, the node does not answer, or the connection was closed."""


class HandshakeError(ForwardError):
    """The API server can be reached but does not forward the port."""


class PortForwardSocket:
    """A connection to a port of a pod, with the methods of a socket that :mod:`http.client` uses.

    Args:
        api: of the cluster.
        namespace: of the pod.
        pod: its name.
        port: number.
        patience: longest time without a byte, in seconds.

    Raises:
        ApiRefusedError: the API server rejects the request.
        HandshakeError: the API server does not forward the port, after several tries.
        CliError: the API server cannot be reached.
    """

    def __init__(self, api: Api, namespace: str, pod: str, port: int, patience: float) -> None:
        self._pod, self._patience = pod, patience
        self._websocket = _open_websocket(api, namespace, pod, port)
        self._headers = {DATA: 0, ERROR: 0}  # received bytes of the port number, by channel

    def sendall(self, data: Any) -> None:
        """Send bytes."""
        try:
            self._websocket.send(DATA + bytes(data))
        except ConnectionClosed:
            self.receive()  # raises the error that may have arrived before
            raise ForwardError(f"the connection to pod {self._pod} was closed; try again") from None

    def receive(self) -> bytes:
        """Return the next bytes; empty when the other side has closed the connection."""
        while True:
            try:
                frame = self._websocket.recv(self._patience, decode=False)
            except TimeoutError:
                raise ForwardError(f"pod {self._pod} sent nothing for {self._patience:.0f} s; try again") from None
            except ConnectionClosed:
                return b""
            assert isinstance(frame, bytes), "decode=False returns bytes"
            channel, data = frame[:1], frame[1:]
            if channel not in self._headers:
                continue
            skipped = min(PORT_BYTES - self._headers[channel], len(data))
            self._headers[channel] += skipped
            data = data[skipped:]
            if data and channel == ERROR:
                raise ForwardError(f"forwarding to pod {self._pod} failed: {data.decode(errors='replace').strip()}")
            if data:
                return data

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the received data as a file; closing it closes the connection."""
        assert mode == "rb", "http.client uses no other mode"
        return io.BufferedReader(_ReceivedStream(self), 1 << 16)

    def close(self) -> None:
        """Do nothing: http.client closes its socket while the answer is still being read."""

    def end(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError, ConnectionClosed):
            self._websocket.close()


class _ReceivedStream(io.RawIOBase):
    """The received bytes as a raw stream."""

    def __init__(self, connection: PortForwardSocket) -> None:
        self._connection = connection
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest or self._connection.receive()
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._rest = data[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._connection.end()
        super().close()


def _open_websocket(api: Api, namespace: str, pod: str, port: int) -> ClientConnection:
    """Return the WebSocket of a forwarded port; raises as :class:`PortForwardSocket`."""
    why = ""
    for tries in range(HANDSHAKE_TRIES):
        if tries:
            time.sleep(HANDSHAKE_PAUSE_SECONDS * 2 ** (tries - 1))
        try:
            return _handshake(api, namespace, pod, port)
        except (*CONNECTION_ERRORS, InvalidHandshake) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):  # a second try would take as long
                break
    raise HandshakeError(f"port {port} of pod {pod} is not forwarded: {why}; try again")


def _handshake(api: Api, namespace: str, pod: str, port: int) -> ClientConnection:
    """Try to open the WebSocket once."""
    path = f"{PODS.path(namespace, pod, 'portforward')}?{urlencode({'ports': port})}"
    headers = {name: value for name, value in api.headers().items() if name not in ("Connection", "Accept")}
    agent = headers.pop("User-Agent")
    sock = api.dial()  # TLS is done here: websockets receives a plain connection
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
    except (*CONNECTION_ERRORS, InvalidHandshake):
        sock.close()
        raise


def get(
    api: Api, namespace: str, pod: str, port: int, path: str, patience: float = SILENCE_SECONDS
) -> http.client.HTTPResponse:
    """Return the answer to a GET of ``path``, of any status; the caller closes it.

    Args:
        api: of the cluster.
        namespace: of the pod.
        pod: its name.
        port: number.
        path: with its query.
        patience: longest time without a byte, in seconds.

    Raises:
        ApiRefusedError: the API server rejects the request.
        ForwardError: the pod does not answer.
        CliError: the API server cannot be reached.
    """
    sock = PortForwardSocket(api, namespace, pod, port, patience)
    connection = http.client.HTTPConnection(pod, port)
    connection.sock = sock
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse()
    except http.client.HTTPException as error:
        sock.end()
        why = str(error) or type(error).__name__
        raise ForwardError(f"pod {pod} does not answer: {why.lower()}; try again") from None
    except BaseException:  # including Ctrl-C: the WebSocket is always closed
        sock.end()
        raise
