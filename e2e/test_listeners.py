"""Every socket on which a process listens has limits for peers without a token."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = "core/src/rljob/protocol/http_server.py"
LISTENING = {
    "AppRunner",
    "HTTPServer",
    "Listener",
    "ServerConnection",
    "SockSite",
    "TCPServer",
    "TCPSite",
    "TCPStore",
    "ThreadingHTTPServer",
    "ThreadingTCPServer",
    "UnixSite",
    "create_server",
    "create_unix_server",
    "run_app",
    "start_http_server",
    "start_server",
    "start_unix_server",
    "start_wsgi_server",
}
"""Functions and classes of the libraries in use that listen, whatever module they are of."""
SERVER_LIBRARIES = {"uvicorn", "hypercorn", "http.server", "socketserver", "aiohttp.web", "wsgiref", "grpc"}
SERVERS = {
    "coordinator/src/rljob/coordinator/local_api_server.py",
    "coordinator/src/rljob/coordinator/serve.py",
    "coordinator/src/rljob/runner/agents/agent_endpoint.py",
    "core/src/rljob/protocol/service_server.py",
    "operator/src/rljob/operator/metrics_server.py",
    "rollout-image/src/rljob/rollout/frozen_engine.py",
}
OTHERS = {
    "coordinator/src/rljob/coordinator/local_api_server.py": "its socket is served by an HttpServer",
    "coordinator/src/rljob/coordinator/serve.py": "calls LocalApiServer.listen",
    "core/src/rljob/protocol/request_limits.py": "types of ASGI",
    "core/src/rljob/protocol/websocket_protocol.py": "WebSockets of a server with limits",
    "rollout-image/src/rljob/rollout/adapters/sglang/main.py": "sets the limits of SGLang's own server",
    "rollout-image/src/rljob/rollout/adapters/sglang/sglang_scheduler.py": "moves SGLang's store to loopback",
    "rollout-image/src/rljob/rollout/adapters/vllm/main.py": "sets the limits of vLLM's own server",
    "trainer-image/src/rljob/trainer/process_group.py": "the ranks of one trainer; not HTTP",
    "transfer/src/rljob/transfer/": "weight groups of a trainer and an engine; not HTTP",
}
"""Files that name one of these, and why they need no limits here."""


def listeners() -> Iterator[tuple[str, str]]:
    """Yield file and name of every call or import that makes a listener."""
    for path in sorted(ROOT.glob("*/src/rljob/**/*.py")):
        file = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                attribute = isinstance(function, ast.Attribute)
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if name in LISTENING or (attribute and name == "listen"):
                    yield file, name
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in modules:
                for library in SERVER_LIBRARIES:
                    if module == library or module.startswith(f"{library}."):
                        yield file, library


def test_processes_listen_only_through_the_server_with_limits() -> None:
    found = {file for file, _ in listeners() if file != SERVER}
    assert {file for file in found if not file.startswith(tuple(OTHERS))} == set()
    assert {prefix for prefix in OTHERS if not any(file.startswith(prefix) for file in found)} == set(), "remove it"


def test_every_server_is_the_one_with_limits() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("*/src/rljob/**/*.py")}
    assert {file for file, text in sources.items() if "HttpServer(" in text or "(HttpServer)" in text} == SERVERS | {
        SERVER
    }
    tree = ast.walk(ast.parse(sources[SERVER]))
    used = {
        ast.unparse(node)
        for node in tree
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("uvicorn.")
    }
    assert used == {"uvicorn.Config", "uvicorn.Server"}
