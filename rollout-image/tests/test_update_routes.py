"""rljob's routes in vLLM's server, with a fake engine: what the workers answer, and what the agent receives."""

import json
from types import SimpleNamespace

import pytest

from rljob.rollout.adapters.vllm.update_routes import JOIN, RECEIVE, UpdateRoutes


class FakeEngine:
    """``replies``: for each data-parallel replica what its workers answer."""

    def __init__(self, *replies):
        self.engine_core = self
        self.calls, self.version = [], ""
        self._replies = replies

    async def call_utility_all_async(self, *call):
        self.calls.append(call)
        return self._replies

    async def update_weight_version(self, version):
        self.version = version


async def post(engine, path, body):
    """Return status and body of the reply."""
    sent = []

    async def receive():
        return {"body": json.dumps(body).encode()}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
    await UpdateRoutes(None)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def ok(digest):
    return {"digest": digest, "error": ""}


def failed(error):
    return {"digest": "", "error": error}


async def test_every_worker_of_every_replica_joins_and_receives():
    engine = FakeEngine([ok("d"), ok("d")], [ok("d"), ok("d")])
    assert await post(engine, JOIN, {"group": "nonce"}) == (200, None)
    order = {"update": {"names": ["a"]}, "weight_version": "0.7"}
    assert await post(engine, RECEIVE, order) == (200, {"digests": ["d"] * 4})
    assert engine.calls == [
        ("collective_rpc", "rljob_join", None, ({"group": "nonce"},), None),
        ("collective_rpc", "rljob_receive", None, ({"names": ["a"]},), None),
    ]
    assert engine.version == "0.7"


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([[failed("KeyError: 'w'")]], "RuntimeError: KeyError: 'w'"),
        ([[ok("d"), failed("left")]], "RuntimeError: worker 1 of 2: left"),
        ([[ok("d")], [failed("left")]], "RuntimeError: worker 1 of 2: left"),
        ([[failed("a"), failed("b")]], "RuntimeError: worker 0 of 2: a; worker 1 of 2: b"),
    ],
)
async def test_the_failure_of_one_worker_fails_the_call_and_commits_no_version(replies, message):
    engine = FakeEngine(*replies)
    order = {"update": {}, "weight_version": "0.7"}
    for path, body in ((JOIN, {}), (RECEIVE, order)):
        assert await post(engine, path, body) == (500, {"error": {"message": message}})
    assert engine.version == ""
