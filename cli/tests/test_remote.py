"""Commands on jobs in a cluster, without a cluster: port forwarding, log lines, quantities, messages."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest
from websockets.exceptions import InvalidMessage
from websockets.sync.server import ServerConnection, serve

from rljob.kube.access import Access
from rljob.kube.errors import AccessError, error_of
from rljob.kube.plugin import Credential
from rljob.kube.sync_client import SyncApiClient
from rljob.local.errors import CliError
from rljob.local.snapshot_view import plain_lines
from rljob.remote import export, port_forward
from rljob.remote.api import Api, ApiRefusedError
from rljob.remote.coordinator_api import CoordinatorApi, CoordinatorUnavailableError
from rljob.remote.job import RemoteJob, job_snapshot
from rljob.remote.lookup import Namespace
from rljob.remote.pod_logs import _lines
from rljob.remote.pod_usage import quantity
from rljob.remote.port_forward import ForwardError, HandshakeError

PORT = (8080).to_bytes(2, "little")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nRljob-Note: well\r\n\r\nhello!"
Forward = Callable[[], http.client.HTTPResponse]


@pytest.fixture
def forward() -> Iterator[Callable[[Callable[[ServerConnection], None]], Forward]]:
    """An API server whose forwarded port is served by a function."""
    servers: list[Any] = []

    def start(handle: Callable[[ServerConnection], None]) -> Forward:
        server = serve(handle, "127.0.0.1", 0, subprotocols=[port_forward.PROTOCOL], compression=None)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.socket.getsockname()
        api = Api(Access(f"http://{host}:{port}/prefix", token="t", context="c"))
        return lambda: port_forward.get(api, "team-a", "sums-coordinator-0", 8080, "/v1/status")

    yield start
    for server in servers:
        server.shutdown()


def answering(frame: bytes) -> Callable[[ServerConnection], None]:
    """Return a handler that answers a request with one frame."""

    def handle(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(frame)

    return handle


def test_http_goes_through_the_frames_of_a_forwarded_port(forward: Any) -> None:
    asked: list[Any] = []

    def handle(connection: ServerConnection) -> None:
        assert connection.request is not None
        asked.append((connection.request.path, connection.request.headers["Authorization"]))
        for frame in (b"\0" + PORT, b"\1" + PORT):
            connection.send(frame)
        asked.append(connection.recv())
        for i in range(0, len(ANSWER), 7):  # frames with arbitrary boundaries
            connection.send(b"\0" + ANSWER[i : i + 7])

    with forward(handle)() as answer:
        assert (answer.status, answer.getheader("Rljob-Note"), answer.read()) == (200, "well", b"hello!")
    path = "/prefix/api/v1/namespaces/team-a/pods/sums-coordinator-0/portforward?ports=8080"
    assert asked[0] == (path, "Bearer t")
    assert asked[1].startswith(b"\0GET /v1/status HTTP/1.1\r\n")


def test_the_port_number_may_arrive_in_one_frame_with_data(forward: Any) -> None:
    with forward(answering(b"\0" + PORT + ANSWER))() as answer:
        assert answer.read() == b"hello!"


def test_a_closed_port_is_reported_with_the_message_of_the_node(forward: Any) -> None:
    def handle(connection: ServerConnection) -> None:
        connection.send(b"\0" + PORT)
        connection.send(b"\1" + PORT + b"error forwarding port 8080: connection refused\n")

    with pytest.raises(ForwardError, match=r"^forwarding to pod sums-coordinator-0 failed: .*: connection refused$"):
        forward(handle)()


def test_a_connection_that_closes_without_an_answer_is_an_error(forward: Any) -> None:
    with pytest.raises(ForwardError, match=r"pod sums-coordinator-0 .*; try again$"):
        forward(lambda connection: connection.close())()


def test_a_truncated_answer_is_an_error(forward: Any) -> None:
    with (
        forward(answering(b"\0" + PORT + ANSWER[:-2]))() as answer,
        pytest.raises(http.client.IncompleteRead),
    ):
        answer.read()


def test_a_failed_handshake_is_retried(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, known = [], port_forward.connect

    def connect(*arguments: Any, **options: Any) -> Any:
        tried.append(options["sock"])
        if len(tried) < 3:
            raise InvalidMessage("did not receive a valid HTTP response")
        return known(*arguments, **options)

    monkeypatch.setattr(port_forward, "connect", connect)
    monkeypatch.setattr(port_forward, "HANDSHAKE_PAUSE_SECONDS", 0)
    with forward(answering(b"\0" + PORT + ANSWER))() as answer:
        assert answer.read() == b"hello!"
    assert [sock.fileno() for sock in tried[:2]] == [-1, -1], "they are closed"


def test_a_connection_that_closes_before_the_handshake_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "HANDSHAKE_PAUSE_SECONDS", 0)
    dialled: list[socket.socket] = []

    def dial(self: Api) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        dialled.append(ours)
        return ours

    monkeypatch.setattr(Api, "dial", dial)
    api = Api(Access("http://localhost:1", context="c"))
    with pytest.raises(HandshakeError, match=r"^port 8080 of pod sums-coordinator-0 is not forwarded: .*; try again$"):
        port_forward.get(api, "team-a", "sums-coordinator-0", 8080, "/")
    assert len(dialled) == port_forward.HANDSHAKE_TRIES and all(sock.fileno() == -1 for sock in dialled)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1\r\n\r\n"])
def test_a_failed_handshake_is_not_reported_as_an_error_of_api_server_or_job(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(port_forward, "HANDSHAKE_PAUSE_SECONDS", 0)
    monkeypatch.setattr(Namespace, "pods", lambda self, job, role="": [pod("sums-coordinator-0")])
    tries = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            for _ in range(port_forward.HANDSHAKE_TRIES):
                connection, _ = server.accept()
                with connection:
                    tries.append(connection.recv(1 << 16))
                    connection.sendall(answer)

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        host, port = server.getsockname()
        where = Namespace(Api(Access(f"http://{host}:{port}", context="c")), "team-a")
        with pytest.raises(CoordinatorUnavailableError) as caught:
            RemoteJob(where, {"metadata": {"name": "sums"}, "spec": {}}).coordinator.ask("/v1/samples", list[int])
        thread.join()
    assert len(tries) == port_forward.HANDSHAKE_TRIES
    assert re.fullmatch(
        r"port \d+ of pod sums-coordinator-0 is not forwarded: did not receive a valid HTTP response; try again",
        caught.value.sentence,
    )


@pytest.mark.parametrize(
    ("code", "status", "sentence"),
    [
        (
            401,
            {},
            "context c does not accept the credentials of user jane: they have expired or are wrong; log in again",
        ),
        (
            403,
            {"message": "pods is forbidden"},
            "context c does not allow it: pods is forbidden; ask its administrator",
        ),
        (404, {"message": "not found", "details": {"name": "x"}}, "context c rejects the request: not found"),
        (
            404,
            {"message": "the server could not find it"},
            "context c does not serve RLJobs; install the chart rljob-crds",
        ),
        (500, {"message": "etcd is away"}, "context c rejects the request: etcd is away"),
    ],
)
def test_a_refusal_is_one_sentence(code: int, status: dict[str, Any], sentence: str) -> None:
    api = Api(Access("https://k:1", context="c", user="jane"))
    error = api.refusal(error_of(code, json.dumps({"kind": "Status", **status}).encode()))
    assert error.sentence.startswith(sentence) and error.exit_code == (1 if code == 500 else 2)
    assert error.missing_object == ("details" in status)


def test_an_answer_that_is_not_from_an_api_server_is_an_error() -> None:
    api = Api(Access("https://k:1", context="c"))
    assert (
        api.refusal(error_of(502, b"<html>bad gateway</html>")).sentence
        == "context c rejects the request: <html>bad gateway</html>"
    )
    assert isinstance(api.refusal(error_of(404, b"\xff")), ApiRefusedError)


def test_an_unsupported_proxy_is_rejected() -> None:
    with pytest.raises(AccessError, match="the proxy socks5://p is not supported"):
        SyncApiClient(Access("https://k:1", proxy="socks5://me:secret@p:1"), "test").connection()


def test_the_loopback_address_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert (SyncApiClient(Access("http://127.0.0.1:1"), "test").connection().host) == "127.0.0.1"
    monkeypatch.setenv("http_proxy", "http://user:pw@proxy:3128")
    through = SyncApiClient(Access("http://k:1"), "test").connection()
    assert (through.host, through.port) == ("proxy", 3128)
    assert through._tunnel_host == "k"  # type: ignore[attr-defined]


def test_no_proxy_may_name_networks_and_a_proxy_may_have_no_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "proxy:3128")
    assert (SyncApiClient(Access("http://10.1.2.3:1"), "test").connection().host) == "proxy"
    monkeypatch.setenv("no_proxy", "example.com, 10.0.0.0/8")
    assert (SyncApiClient(Access("http://10.1.2.3:1"), "test").connection().host) == "10.1.2.3"


def test_repr_contains_no_secrets() -> None:
    assert "hidden" not in repr(Access("https://k", token="hidden")) + repr(Credential("hidden", "c", "hidden"))


def pod(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "creationTimestamp": ""}, "status": {"phase": "Running"}, "spec": {}}


class _Breaking(io.BytesIO):
    """An answer whose connection closes after some bytes."""

    status = 200

    def __init__(self, data: bytes, whole: bool) -> None:
        super().__init__(data)
        self._whole = whole

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if not found and not self._whole:
            raise ForwardError("the connection was closed")
        return found

    def getheader(self, name: str) -> str | None:
        return None


@pytest.mark.parametrize("digest", ["", "0" * 64, "ledger"])
def test_an_export_continues_after_a_closed_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digest: str
) -> None:
    """``digest``: of the configuration, if its file is damaged; "ledger": the record is not that of the ledger."""
    header = b'{"w": {"dtype": "U8", "shape": [90], "data_offsets": [0, 90]}}'
    files = {"config.json": b"{}", "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(range(90))}
    asked = []

    def get(api: Api, namespace: str, pod: str, port: int, path: str, patience: float) -> Any:
        asked.append(path)
        name, _, query = path.removeprefix("/v1/checkpoints").removeprefix("/8/").partition("?offset=")
        if not name:
            sizes = {name: len(data) for name, data in files.items()}
            digests = {name: blake3.blake3(data).hexdigest() for name, data in files.items()}
            kept = [{"step": 8, "files": sizes, "digests": digests | {"config.json": digest or digests["config.json"]}}]
            if digest == "ledger":
                kept[0] |= {"files": {}, "digests": {}, "damage": "trainer.json is of another run"}
            return _Breaking(json.dumps(kept).encode(), True)
        rest = files[name][int(query) :]
        return _Breaking(rest[:50], len(rest) <= 50)

    monkeypatch.setattr(port_forward, "get", get)
    monkeypatch.setattr(export, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(Namespace, "pods", lambda self, job, role="": [pod("sums-coordinator-0")])
    body = {"metadata": {"name": "sums"}, "spec": {}}
    job = RemoteJob(Namespace(Api(Access("https://k:1")), "team-a"), body)
    if digest:
        problem = "trainer.json is of another run" if digest == "ledger" else r"config.json is damaged .*"
        with pytest.raises(CliError, match=rf"the checkpoint of step 8: {problem}; there is no other checkpoint$"):
            export.export(job, tmp_path / "model", None)
        assert not (tmp_path / "model").exists()
        return
    assert export.export(job, tmp_path / "model", None) == 8
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == files
    assert [path.partition("=")[2] for path in asked] == ["", "0", "0", "50", "100", "150"][: len(asked)]
    assert len(asked) > 3


@pytest.mark.parametrize(
    "pods, sentence",
    [
        ([pod("sums-coordinator-0")], "the coordinator of sums does not answer: the port is closed; try again"),
        ([], "sums has succeeded and its coordinator has gone"),
    ],
    ids=["it runs", "it left meanwhile"],
)
def test_only_a_coordinator_without_a_pod_is_reported_as_gone(
    monkeypatch: pytest.MonkeyPatch, pods: list[dict[str, Any]], sentence: str
) -> None:
    seen = iter([[pod("sums-coordinator-0")], pods])

    def get(*_: object) -> Any:
        raise ForwardError("the port is closed")

    monkeypatch.setattr(port_forward, "get", get)
    monkeypatch.setattr(Namespace, "pods", lambda self, job, role="": next(seen))
    ended = {"metadata": {"name": "sums"}, "spec": {}, "status": {"conditions": [condition("Complete")]}}
    with pytest.raises(CoordinatorUnavailableError, match=re.escape(sentence)):
        CoordinatorApi(Namespace(Api(Access("https://k:1")), "team-a"), ended).ask("/v1/status", dict)


@pytest.mark.parametrize(
    "metadata, sentence",
    [
        ({}, "the coordinator of sums is starting; try again"),
        ({"deletionTimestamp": "now"}, "sums has succeeded and its coordinator has gone"),
    ],
    ids=["it starts", "it leaves"],
)
def test_a_pending_coordinator_of_a_finished_job_is_not_reported_as_gone(
    monkeypatch: pytest.MonkeyPatch, metadata: dict[str, str], sentence: str
) -> None:
    pending = pod("sums-coordinator-0")
    pending["metadata"] |= metadata
    pending["status"]["phase"] = "Pending"
    monkeypatch.setattr(Namespace, "pods", lambda self, job, role="": [pending])
    ended = {"metadata": {"name": "sums"}, "spec": {}, "status": {"conditions": [condition("Complete")]}}
    with pytest.raises(CoordinatorUnavailableError, match=re.escape(sentence)):
        CoordinatorApi(Namespace(Api(Access("https://k:1")), "team-a"), ended).ask("/v1/status", dict)


def condition(kind: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": kind, "message": ""}


class _Answer(io.BytesIO):
    """Lines of a log as the API server sends them."""


def test_log_lines_have_the_timestamps_of_kubernetes() -> None:
    text = (
        b"2026-01-31T12:00:00.5Z one two\n2026-01-31T12:00:01Z \nunable to retrieve logs\n2026-01-31T12:00:02Z \xff\n"
    )
    lines = list(_lines(_Answer(text), "trainer"))  # type: ignore[arg-type]
    assert [line.text for line in lines] == ["one two", "", "unable to retrieve logs", "\ufffd"]
    begin = 1769860800.0
    assert [line.time - begin for line in lines] == [0.5, 1.0, 1.0, 2.0]
    later = list(_lines(_Answer(text), "trainer", begin + 0.5))  # type: ignore[arg-type]
    assert [line.text for line in later] == ["", "unable to retrieve logs", "\ufffd"]


@pytest.mark.parametrize(
    ("text", "value"), [("250m", 0.25), ("12345678n", 0.012345678), ("3", 3.0), ("64Mi", 2.0**26), ("1500k", 1.5e6)]
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == pytest.approx(value)


def test_a_job_is_rendered_with_its_roles_and_their_problems() -> None:
    roles = [
        {"name": "trainer", "ready": 1, "desired": 1, "restarts": 2, "lastExit": "exit code 137: OOMKilled"},
        {
            "name": "rollout-main",
            "ready": 1,
            "desired": 2,
            "summary": "1 of 2 pods pending: insufficient nvidia.com/gpu",
        },
    ]
    ready = {"type": "Ready", "status": "False", "reason": "PodsPending", "message": "1 of 2 pods pending"}
    body = {
        "metadata": {"name": "sums", "creationTimestamp": "2026-01-31T12:00:00Z"},
        "spec": {},
        "status": {"roles": roles, "conditions": [ready]},
    }
    api = Api(Access("https://k:1", context="prod"))
    found = job_snapshot(Namespace(api, "team-a"), body, None)
    head, *lines = plain_lines(found)
    assert head.startswith("sums  prod/team-a  ")
    assert lines == [
        "state      starting: 1 of 2 pods pending",
        "exited     trainer exit code 137: OOMKilled",
        "components ● trainer 1/1 (2 restarts)",
        "           ● rollout-main 1/2: 1 of 2 pods pending: insufficient nvidia.com/gpu",
    ]
    assert found.exit_code == 0 and found.data()["components"][1]["state"] == "waiting"
