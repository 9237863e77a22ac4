"""Ray on the hosts of an engine that spans hosts. A program in the place of Ray's; the last test runs Ray itself."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import stat
import sys
from types import SimpleNamespace

import pytest

from rljob.rollout import agent_process, ray_node, ray_worker
from rljob.rollout import main as entry
from rljob.rollout.ray_node import RayEndedError, ray_command, ray_environment, while_ray_runs
from rljob.rollout.supervisor import EngineStartError

START = "ray start --head --port=6379 --num-gpus=8 --block"
TOKEN = "/etc/rljob/token/ray-token"
GIVEN = {"KUBERAY_GEN_RAY_START_CMD": START, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": TOKEN}


@pytest.fixture
def ray(monkeypatch):
    """Setter of the installed version of Ray."""

    def installed(version):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: version and SimpleNamespace())
        monkeypatch.setattr(ray_node.metadata, "version", lambda name: version)

    installed("2.60.0")
    return installed


def test_ray_starts_by_the_command_of_kuberay_at_the_address_of_the_pod(ray):
    command = ray_command(GIVEN, "10.0.0.7")
    assert command[:3] == [sys.executable, "-m", "ray.scripts.scripts"]
    assert command[3:] == [*START.split()[1:], "--node-ip-address=10.0.0.7"]


@pytest.mark.parametrize(
    ("changed", "version", "sentence"),
    [
        ({"KUBERAY_GEN_RAY_START_CMD": ""}, "2.60.0", "KubeRay sets it in the pods of a RayCluster"),
        ({"KUBERAY_GEN_RAY_START_CMD": "sh -c 'ray start'"}, "2.60.0", "KubeRay sets it"),
        ({}, None, "Ray is not installed in this image; use one with ray 2.52 or later"),
        ({}, "2.51.2", "Ray 2.51.2 of this image cannot check the token"),
        ({"RAY_AUTH_MODE": "disabled"}, "2.60.0", "RAY_AUTH_MODE is not token"),
        ({"RAY_AUTH_TOKEN_PATH": ""}, "2.60.0", "RAY_AUTH_TOKEN_PATH is not set"),
    ],
)
def test_a_pod_that_cannot_keep_others_out_of_ray_refuses_to_start(ray, changed, version, sentence):
    ray(version)
    with pytest.raises(ValueError, match=sentence):
        ray_command({**GIVEN, **changed}, "10.0.0.7")


def test_workers_of_the_engine_listen_at_the_address_of_their_pod_and_have_no_token_of_the_coordinator():
    given = {"RLJOB_TOKEN": "t", "RLJOB_TOKEN_FILE": "f", "TMPDIR": "/tmp/rljob-engine-x", "NCCL_IB_HCA": "mlx5"}
    made = ray_environment(given, "10.0.0.7")
    assert made["VLLM_HOST_IP"] == "10.0.0.7" and made["NCCL_IB_HCA"] == "mlx5" and made["TMPDIR"] == "/tmp"
    assert not made.keys() & {"RLJOB_TOKEN", "RLJOB_TOKEN_FILE", "GLOO_SOCKET_IFNAME"}


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Setter of the shell script that runs in the place of Ray; the hosts join at once."""

    def place(text, joined=True):
        path = tmp_path / "ray"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(ray_node, "ray_command", lambda environment, host: [str(path), host])

        async def wait_joined(hosts):
            if not joined:
                await asyncio.Event().wait()

        monkeypatch.setattr(ray_node, "wait_joined", wait_joined)

    return place


async def test_the_engine_runs_while_ray_runs_and_ray_ends_with_it(program, tmp_path):
    program(f"echo $$ > {tmp_path}/pid; sleep 600 & wait")
    ran = []

    async def run():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        ran.append(int((tmp_path / "pid").read_text()))

    await while_ray_runs("10.0.0.7", 2, run)
    assert not os.path.exists(f"/proc/{ran[0]}")


@pytest.mark.parametrize("joined", [True, False])
async def test_the_end_of_ray_ends_the_engine(program, joined):
    program("exit 7", joined)
    cancelled = []

    async def run():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(RayEndedError, match="Ray exited with code 7"):
        await while_ray_runs("10.0.0.7", 2, run)
    assert bool(cancelled) == joined


async def test_an_error_of_the_engine_is_raised_and_ends_ray(program, tmp_path):
    program("exec sleep 600")

    async def run():
        raise ExceptionGroup("of the agent's tasks", [OSError(28, "No space left on device")])

    with pytest.raises(ExceptionGroup):
        await while_ray_runs("10.0.0.7", 2, run)


async def test_a_cancelled_engine_ends_ray(program, tmp_path):
    program(f"echo $$ > {tmp_path}/pid; exec sleep 600", joined=False)
    running = asyncio.ensure_future(while_ray_runs("10.0.0.7", 2, asyncio.Event().wait))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not os.path.exists(f"/proc/{int((tmp_path / 'pid').read_text())}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineStartError("the engine server exited with code 1: an actor died", "its last line"), 1),
        (EngineStartError("the engine server exited with code 2: no such option", "", permanent=True), 2),
    ],
)
def test_only_refused_settings_of_an_engine_on_several_hosts_end_the_run(error, code, program, monkeypatch):
    program("exec sleep 600")

    async def run():
        raise ExceptionGroup("of the agent's tasks", [error])

    service = agent_process.AcrossHosts(SimpleNamespace(run=run), "10.0.0.7", 2)
    monkeypatch.setattr(agent_process, "build", lambda environment: service)
    given = SimpleNamespace(name="main")
    monkeypatch.setattr("rljob.protocol.environment.read_environment", lambda: given)
    monkeypatch.setattr("sys.argv", ["rljob-agent"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == code


# --- a worker's host --------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path, monkeypatch, manifest):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    parallelism = {"tensor": 2, "pipeline": 1, "data": 1}
    written = json.loads(manifest("job://model", hosts=2, parallelism=parallelism))
    (tmp_path / "job.json").write_text(json.dumps(written))
    monkeypatch.setenv("RLJOB_JOB", str(tmp_path / "job.json"))
    monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
    monkeypatch.setenv("RLJOB_NAME", "main")
    monkeypatch.setenv("RLJOB_HOST", "10.0.0.8")
    monkeypatch.setenv("RLJOB_READY", str(tmp_path / "ready"))
    monkeypatch.setenv("RLJOB_ACCELERATOR", "nvidia")
    from rljob.protocol.environment import read_environment

    return read_environment()


async def test_a_worker_is_ready_when_it_has_joined_and_leaves_late_on_sigterm(
    environment, program, tmp_path, monkeypatch
):
    program("exec sleep 600")
    monkeypatch.setattr(ray_worker, "LEAVING_SECONDS", 0.05)
    running = asyncio.ensure_future(ray_worker.work(environment))
    while not (tmp_path / "ready").exists():
        await asyncio.sleep(0.01)
        assert not running.done(), running.result()
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert not (tmp_path / "ready").exists()


async def test_a_worker_whose_ray_ends_ends_too(environment, program):
    program("exit 1")
    with pytest.raises(RayEndedError, match="Ray exited with code 1"):
        await ray_worker.work(environment)


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("hosts: Ray is not installed"), 2), (RayEndedError("Ray exited with code 1"), 1)]
)
def test_the_exit_code_of_a_worker_tells_whether_a_restart_helps(environment, error, code, monkeypatch, caplog):
    async def work(given):
        assert given.name == "main"
        raise error

    monkeypatch.setattr(ray_worker, "work", work)
    monkeypatch.setattr("sys.argv", ["rljob-agent", "--worker"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == code and str(error) in caplog.text


# --- Ray itself -------------------------------------------------------------------------------------------------------


RAY = "--num-cpus=1 --num-gpus=1 --object-store-memory=100000000 --metrics-export-port=8081 --block"
HEAD = f"ray start --head --port=6379 --include-dashboard=false --dashboard-host=127.0.0.1 {RAY}"
WORKER = f"ray start --address=127.0.0.1:6379 {RAY}"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(180)
async def test_ray_itself_starts_with_a_token_and_the_engine_waits_for_its_second_host(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("0123456789" * 4)
    given = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "127.0.0.1:6379", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    for name, value in {**given, "KUBERAY_GEN_RAY_START_CMD": HEAD}.items():
        monkeypatch.setenv(name, value)
    joined = asyncio.Event()

    async def run():
        joined.set()

    head = asyncio.ensure_future(while_ray_runs("127.0.0.1", 2, run))
    await ray_node.wait_joined(1)
    assert not joined.is_set()
    monkeypatch.setenv("KUBERAY_GEN_RAY_START_CMD", WORKER)
    worker = await ray_node.RayNode.start("127.0.0.1")
    try:
        await head
        assert joined.is_set()
    finally:
        await worker.stop()
