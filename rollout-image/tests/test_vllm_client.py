"""Requests of the agent to vLLM, against a fake server that answers like vLLM 0.32."""

import importlib.util

import pytest
import uvicorn
from fake_server import serving
from uvicorn.protocols.http.h11_impl import H11Protocol

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import PrepareWeights
from rljob.protocol.shared_messages import ParameterMeta, Probe
from rljob.rollout.adapters.base import BadRequestError, EngineGoneError
from rljob.rollout.adapters.update_steps import StepError, UpdateOutput, UpdatesInOneCall
from rljob.rollout.adapters.vllm.adapter import VllmAdapter
from rljob.rollout.adapters.vllm.main import limit_connections
from rljob.rollout.adapters.vllm.vllm_client import VllmClient


@pytest.fixture
async def server():
    async with serving() as fake:
        fake.answer = {"failed": ""}
        yield fake


@pytest.fixture
async def client(server):
    client = VllmClient(server.url, "secret")
    yield client
    await client.close()


@pytest.mark.parametrize(("status", "kind"), [(400, BadRequestError), (404, BadRequestError), (500, EngineGoneError)])
async def test_refusals_and_failures_raise_different_errors(server, client, status, kind):
    server.status, server.answer = status, {"error": {"message": "because"}}
    with pytest.raises(kind, match=f"vLLM answered {status}.*because"):
        await client.score([7, 8])


async def test_an_invalid_reply_is_a_failure(server, client):
    server.answer = {"scores": ["x"]}
    with pytest.raises(EngineGoneError, match="cannot be read"):
        await client.score([7, 8])


@pytest.mark.parametrize("unknown", [b'"\xff"', b"[" * 100_000 + b"]" * 100_000], ids=["text", "depth"])
async def test_a_reply_with_an_undecodable_part_is_a_failure(server, client, unknown):
    server.answer = b'{"request_id": ' + unknown + b', "unknown": ' + unknown + b"}"
    with pytest.raises(EngineGoneError, match="cannot be read"):
        await client.score([7, 8])


async def test_an_absent_server_is_a_failure():
    client = VllmClient("http://127.0.0.1:9", "k")
    with pytest.raises(EngineGoneError, match="does not answer"):
        await client.resume()
    assert not await client.healthy()
    assert not await client.responsive()
    await client.close()


METAS = [ParameterMeta("a", "float32", [2, 3])]
RECEIVE = {"update": {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 3]]}, "weight_version": "2.9"}


def order(in_flight="keep", probe=()):
    return PrepareWeights(1, 2, 9, "nonce", "h", 5, 2, "gloo", 64, METAS, Probe([*probe], []), in_flight, 9.0)


@pytest.mark.parametrize(
    ("in_flight", "mode", "clear"),
    [("keep", "keep", True), ("keepStaleCache", "keep", False), ("abort", "abort", True), ("wait", "wait", True)],
)
async def test_each_in_flight_mode_has_its_pause(server, client, in_flight, mode, clear):
    pause = {"mode": mode, "clear_cache": clear}
    await client.pause(in_flight)
    assert server.calls[0][:2] == ("/rljob/update", {"pause": pause})
    await client.update_in_one_call(order(in_flight), 2.0)
    assert server.calls[1][1]["pause"] == pause


async def test_an_update_is_one_call(server, client):
    server.answer |= {"digest": "d1", "scores": [[-1.0]], "seconds": {"pause": 0.1}}
    assert isinstance(client, UpdatesInOneCall)
    await client.join(order(), 3.0)
    output = await client.update_in_one_call(order(probe=[[7, 8]]), 2.0)
    assert output == UpdateOutput("d1", [[-1.0]], {"pause": 0.1})
    (path, info, _), update = server.calls
    assert path == "/rljob/join"
    assert (info["group"], info["port"], info["timeout_seconds"], info["bucket_bytes"]) == ("nonce", 5, 3.0, 64)
    steps = {"receive": RECEIVE, "resume": True, "score": [[7, 8]], "seconds": 2.0}
    assert update[:2] == ("/rljob/update", {"pause": {"mode": "keep", "clear_cache": True}, **steps})


async def test_steps_of_their_own_are_calls_of_their_own(server, client):
    server.answer |= {"digest": "d1", "scores": [[-1.5, -2.5]]}
    assert await client.receive(order(), 2.0) == "d1"
    await client.resume()
    assert await client.score([7, 8, 9]) == [-1.5, -2.5]
    bodies = [body for _, body, _ in server.calls]
    assert bodies == [{"receive": RECEIVE, "seconds": 2.0}, {"resume": True}, {"score": [[7, 8, 9]]}]


@pytest.mark.parametrize("step", ["pause", "receive", "resume", "score"])
async def test_the_step_that_failed_is_named(server, client, step):
    server.answer = {"failed": step, "error": "KeyError: 'w'"}
    with pytest.raises(StepError, match=f"vLLM failed to {step}: KeyError: 'w'") as caught:
        await client.update_in_one_call(order(), 2.0)
    assert caught.value.step == step


def test_modules_that_vllm_loads_by_name_exist(tmp_path):
    command = VllmAdapter(Rollout(name="main", dtype="float32"), tmp_path).launch(1234, "secret").command
    for option in ("--worker-extension-cls", "--middleware"):
        module = command[command.index(option) + 1].rpartition(".")[0]
        assert importlib.util.find_spec(module) is not None
    assert importlib.util.find_spec(command[command.index("-m") + 1]) is not None


def test_the_headers_of_a_request_to_vllm_are_bounded(tmp_path, monkeypatch):
    for name in ("HTTP_PROTOCOLS", "WS_PROTOCOLS"):
        monkeypatch.setattr(uvicorn.config, name, dict(getattr(uvicorn.config, name)))
    limit_connections()
    config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)  # vLLM gives no implementation either
    config.load()
    assert issubclass(config.http_protocol_class, H11Protocol)
    command = " ".join(
        map(str, VllmAdapter(Rollout(name="main", dtype="float32"), tmp_path).launch(1234, "secret").command)
    )
    assert "--h11-max-incomplete-event-size 65536 " in command


def test_the_key_is_in_the_environment_and_the_manifest_in_the_arguments(tmp_path):
    pool = Rollout(name="main", dtype="float32", max_concurrency=10, max_model_length=100, args=["--seed", "5"])
    launch = VllmAdapter(pool, tmp_path).launch(1234, "secret")
    assert launch.environment["VLLM_API_KEY"] == "secret"
    assert "secret" not in launch.command
    command = " ".join(launch.command)
    for part in (f"--model {tmp_path}", "--port 1234", "--max-num-seqs 18", "--max-model-len 100", "--dtype float32"):
        assert part in command
    assert "--tensor-parallel-size 1 --pipeline-parallel-size 1 --data-parallel-size 1 " in command
    assert command.endswith("--seed 5")


def test_an_engine_has_the_workers_of_the_manifest(tmp_path):
    pool = Rollout(name="main", dtype="float32", parallelism={"tensor": 4, "pipeline": 3, "data": 2})
    command = " ".join(map(str, VllmAdapter(pool, tmp_path).launch(1234, "secret").command))
    assert "--tensor-parallel-size 4 --pipeline-parallel-size 3 --data-parallel-size 2 " in command


def test_the_processes_of_an_engine_in_one_pod_listen_on_loopback(tmp_path):
    launch = VllmAdapter(Rollout(name="main", dtype="float32"), tmp_path).launch(1234, "secret")
    assert launch.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert launch.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "--distributed-executor-backend" not in launch.command


@pytest.mark.parametrize("frozen", [False, True])
def test_workers_on_other_hosts_reach_those_on_the_heads(tmp_path, monkeypatch, frozen):
    monkeypatch.setenv("RLJOB_HOST", "10.0.0.7")
    parallelism = {"tensor": 8, "pipeline": 2}
    pool = Rollout(name="main", dtype="bfloat16", hosts=2, parallelism=parallelism, accelerator={"kind": "nvidia"})
    adapter = VllmAdapter(pool, tmp_path)
    launch = (adapter.launch_frozen if frozen else adapter.launch)(1234, "secret")
    assert launch.environment["VLLM_HOST_IP"] == "10.0.0.7"
    assert "GLOO_SOCKET_IFNAME" not in launch.environment, "gloo finds the address of the host, or the user sets it"
    command = " ".join(map(str, launch.command))
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2 --data-parallel-size 1 " in command
    assert "--distributed-executor-backend ray" in command
    assert "--host 127.0.0.1" in command, "only the agent calls the server"


def test_the_error_of_a_worker_on_another_host_is_found(tmp_path):
    adapter = VllmAdapter(Rollout(name="main", dtype="float32"), tmp_path)
    prefix = "\x1b[36m(RayWorkerProc pid=7, ip=10.0.0.8)\x1b[0m ERROR 01-31 12:00:00 [worker.py:1]"
    lines = ["INFO 01-31 12:00:00 [a.py:1] starts", f"{prefix} torch.OutOfMemoryError: CUDA out of memory"]
    assert adapter.find_error(lines) == "OutOfMemoryError: CUDA out of memory"
