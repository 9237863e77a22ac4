"""The ranks of a node as real processes: the launcher ends when one of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob.protocol import trainer_protocol as m
from rljob.protocol.free_port import free_port
from rljob.trainer import launch as launch_module
from rljob.trainer.launch import Nodes, interface_of, nodes_of


@pytest.fixture
async def launch(tmp_path: Path):
    """Starter of a launcher: ``launch(coordinator, job, processes, VARIABLE=value)``."""
    started: list[asyncio.subprocess.Process] = []

    async def starter(
        coordinator: Any,
        job: Any,
        processes: int = 2,
        program: tuple[str, ...] = ("-m", "rljob.trainer.launch"),
        **more: str,
    ) -> asyncio.subprocess.Process:
        (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
        (tmp_path / "storage").mkdir(exist_ok=True)
        environment = os.environ | {
            "RLJOB_JOB": str(tmp_path / "job.json"),
            "RLJOB_STORAGE": str(tmp_path / "storage"),
            "RLJOB_COORDINATOR": coordinator.url,
            "RLJOB_TOKEN": coordinator.token,
            **more,
        }
        command = (sys.executable, *program, str(processes))
        started.append(await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True))
        return started[-1]

    yield starter
    for process in started:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


FAKE = "import sys; from rljob.trainer import launch; launch.KILL_SECONDS = 0.3; launch.REPORT_SECONDS = {seconds}; "
RANK = "import os, signal, sys, time; rank = int(os.environ['RANK']); "


PRINT_PID = r"os.write(1, b'%d\n' % os.getpid())"  # in one write: ranks share a pipe


def fake(program: str, seconds: float = 0.5, nodes: Nodes = Nodes(), **variables: str) -> subprocess.Popen[str]:
    """Start a launcher of two ranks that run ``program``."""
    command = [sys.executable, "-S", "-c", RANK + program]
    text = FAKE.format(seconds=seconds) + f"sys.exit(launch.launch({command!r}, 2, launch.{nodes!r}))"
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | variables}
    return subprocess.Popen([sys.executable, "-c", text], **given)


OTHER_FAILS_LATER = "rank or sys.exit(1); time.sleep(0.1); sys.exit(2)"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(2)", 2),
        ("sys.exit(2) if rank else time.sleep(99)", 2),
        ("sys.exit(1) if rank else time.sleep(99)", 1),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(99)", 1),
        (OTHER_FAILS_LATER, 2),  # the other rank fails a moment later
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.exit(2) if rank else time.sleep(99)", 2),
    ],
)
def test_the_launcher_exits_with_the_code_of_its_ranks(program, code):
    with fake(program, seconds=60.0 if program == OTHER_FAILS_LATER else 0.5) as launcher:
        assert launcher.wait(60) == code


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, Nodes()),
        (
            {"NODES": "1", "NODE_RANK": "0", "MASTER": "sums-trainer-1-0.sums-trainer"},
            Nodes(1, 0, "sums-trainer-1-0.sums-trainer"),
        ),
        ({"NODES": "4", "NODE_RANK": "3", "MASTER": "first:7"}, Nodes(4, 3, "first:7")),
    ],
)
def test_the_nodes_are_read_from_the_environment(variables, nodes):
    assert nodes_of({f"RLJOB_{name}": value for name, value in variables.items()}) == nodes


def test_the_ranks_of_several_nodes_meet_at_the_first_one():
    assert Nodes(2, 1, "first").address() == ("first", 29500)
    assert Nodes(2, 0, "first:7").address() == ("localhost", 7)  # the cluster's DNS may not have its name yet
    assert Nodes(2, 1, "[fd00::1]:7").address() == ("fd00::1", 7)
    assert Nodes(1, 0, "first:7").address()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RLJOB_NODES": "2", "RLJOB_NODE_RANK": "2", "RLJOB_MASTER": "a"}, "RLJOB_NODE_RANK: 2 is not one of 2 nodes"),
        ({"RLJOB_NODES": "2"}, "RLJOB_MASTER is not set, and there are 2 nodes"),
    ],
)
def test_contradicting_node_variables_are_refused(variables, sentence):
    with pytest.raises(ValueError, match=sentence):
        nodes_of(variables)


def test_the_launcher_writes_the_heartbeat_on_nodes_without_rank_0(tmp_path):
    beat = tmp_path / "beat"
    with fake("time.sleep(99)", nodes=Nodes(2, 1, "first:7"), RLJOB_HEARTBEAT=str(beat)) as launcher:
        for _ in range(2):
            while not beat.exists():
                time.sleep(0.01)
            beat.unlink()
        launcher.terminate()


@pytest.fixture
def rank():
    """A rank that sleeps."""
    with subprocess.Popen(["sleep", "99"]) as process:
        yield process
        process.kill()


def beats(monkeypatch, beat, rank, nodes):
    """Return a function that polls the launcher's heartbeat and returns whether it was written."""
    monkeypatch.setenv("RLJOB_HEARTBEAT", str(beat))
    monkeypatch.setattr(launch_module, "BEAT_SECONDS", 0.0)
    beating = launch_module._beats([rank], nodes)

    def has_beaten():
        beat.unlink(missing_ok=True)
        next(beating)
        return beat.exists()

    next(beating)
    return has_beaten


def test_the_launcher_writes_no_heartbeat_while_a_rank_is_stopped(tmp_path, monkeypatch, rank):
    has_beaten, process = beats(monkeypatch, tmp_path / "beat", rank, Nodes(2, 1, "first:7")), psutil.Process(rank.pid)
    for number, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        rank.send_signal(number)
        while (process.status() == psutil.STATUS_STOPPED) != stopped or process.status() == psutil.STATUS_DISK_SLEEP:
            time.sleep(0.01)
        assert has_beaten() != stopped


def test_the_launcher_writes_no_heartbeat_for_rank_0(tmp_path, monkeypatch, rank):
    """Rank 0 writes its own heartbeat; that of the launcher would hide a rank 0 that hangs."""
    has_beaten = beats(monkeypatch, tmp_path / "beat", rank, Nodes(2, 0, "first:7"))
    assert not has_beaten()


def test_gloo_gets_the_interface_of_the_nodes_address_unless_a_user_sets_it(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("::1") == ""  # gloo uses the address of the node's name
    assert interface_of("192.0.2.1") == ""
    assert Nodes(2, 1, "first", "127.0.0.1").variables() == {"GLOO_SOCKET_IFNAME": "lo"}
    assert Nodes(2, 1, "first", "192.0.2.1").variables() == {}
    assert Nodes(1, 0, "", "127.0.0.1").variables() == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert Nodes(2, 1, "first", "127.0.0.1").variables() == {}


def test_a_signal_ends_all_ranks(tmp_path):
    program = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {PRINT_PID}; time.sleep(99)"
    with fake(program) as launcher:
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.terminate()
        assert launcher.wait(60) == 128 + signal.SIGTERM
        assert not psutil.wait_procs(ranks, timeout=60)[1]


def test_a_trainer_ended_by_a_signal_does_not_exit_with_0():
    program = "from rljob.trainer import main; import time; main._end_on_signal(); print(flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        trainer.terminate()
        assert trainer.wait(60) == 128 + signal.SIGTERM


@pytest.mark.timeout(300)
async def test_a_configuration_error_of_a_rank_is_the_exit_code_of_the_launcher(tmp_path, job, coordinator, launch):
    nothing = {"name": "policy", "source": str(tmp_path / "nothing")}
    process = await launch(
        coordinator, job(models=[nothing]), processes=1
    )  # the tests above cover two ranks, with fakes
    assert await process.wait() == 2


KILLS_NO_RANK = """
import sys
from rljob.trainer import launch
launch.KILL_SECONDS = 1e6
sys.exit(launch.launch([sys.executable, "-m", "rljob.trainer.main"], int(sys.argv[1])))
"""


@pytest.mark.timeout(300)
async def test_two_ranks_in_the_middle_of_a_step_end_by_themselves(job, batch, coordinator, launch):
    coordinator.batches = {0: batch()}
    process = await launch(coordinator, job(), program=("-c", KILLS_NO_RANK))
    await coordinator.admit()
    await coordinator.train(0)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    coordinator.answers = [503] * 1000
    await coordinator.send(m.Train(1, 1, coordinator.batches[0][0].samples, False))
    while all(step != 1 for step, _ in coordinator.pulls):
        await asyncio.sleep(0.01)
    process.terminate()
    assert await process.wait() == 128 + signal.SIGTERM
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.mark.timeout(300)
async def test_two_nodes_train_as_one(job, batch, coordinator, launch):
    coordinator.batches = {0: batch()}
    master = f"127.0.0.1:{free_port()}"
    nodes = [
        await launch(coordinator, job(), 1, RLJOB_NODES="2", RLJOB_NODE_RANK=str(rank), RLJOB_MASTER=master)
        for rank in (1, 0)
    ]
    await coordinator.admit()
    done = await coordinator.train(0)
    assert done.step == 0
    assert {step for step, _ in coordinator.pulls} == {0}
    for node in nodes:
        node.terminate()
    assert [await node.wait() for node in nodes] == [128 + signal.SIGTERM] * 2


WAITS = """
import logging, os, sys
from rljob.trainer import main, process_group
process_group.LOG_SECONDS = 0.0
logging.basicConfig(level="INFO", stream=sys.stdout)
main._end_on_signal()
process_group._rendezvous(int(os.environ["RANK"]), 2)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_node_that_waits_for_other_nodes_ends_on_sigterm(rank):
    port = free_port()
    variables = {"RANK": rank, "MASTER_ADDR": "localhost" if rank == "0" else "first.invalid", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as waiting:
        if rank == "0":
            while not listens(port):
                time.sleep(0.01)
        else:
            assert "waiting for rank 0" in waiting.stdout.readline()
        assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(60) == 128 + signal.SIGTERM


def listens(port: int) -> bool:
    """Return whether a process listens on a port. A test connection would count as one of the ranks it waits for."""
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in psutil.net_connections(kind="tcp")
    )
