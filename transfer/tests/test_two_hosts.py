"""A weight group between two hosts: two network namespaces, of which neither reaches the loopback of the other.

An engine that spans hosts has workers in pods without the trainer and without the agent.
"""

import shutil
import subprocess
import sys

import pytest

SENDER, WORKER = "10.213.77.1", "10.213.77.2"
START = "import sys; sys.stdin.readline()\n"
"""The process begins when its network is there."""
HOST = f"""
import torch, time
from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.weight_group import WeightGroup
listener = RendezvousListener("{SENDER}", 2)
place = listener.rendezvous
print(place.group, place.port, flush=True)
group = WeightGroup.host(listener, "gloo", 50)
group.broadcast(torch.arange(1000), 0, time.monotonic() + 50)
print("sent", flush=True)
sys.stdin.readline()
"""
JOIN = f"""
import torch, time
from rljob.transfer.rendezvous import Rendezvous
from rljob.transfer.weight_group import WeightGroup
nonce, port = sys.stdin.readline().split()
group = WeightGroup.join(Rendezvous(nonce, "{SENDER}", int(port), 2), 1, "gloo", 50)
received = torch.zeros(1000, dtype=torch.int64)
group.broadcast(received, 0, time.monotonic() + 50)
print(received.equal(torch.arange(1000)), flush=True)
"""


def _may_make_networks() -> bool:
    programs = all(map(shutil.which, ("ip", "unshare", "nsenter")))
    return programs and subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _may_make_networks(), reason="this user may make no network namespaces")


@pytest.fixture
def hosts():
    """The process of the sender and that of a worker, each with a network of its own."""
    command = ["unshare", "-n", sys.executable, "-c"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, START + code], **pipes) for code in (HOST, JOIN)]
    one, other = processes
    try:
        link = ["ip", "link", "add", "one", "netns", str(one.pid), "type", "veth", "peer", "name", "other"]
        subprocess.run([*link, "netns", str(other.pid)], check=True)
        for process, name, address in ((one, "one", SENDER), (other, "other", WORKER)):
            inside = ["nsenter", "-t", str(process.pid), "-n", "ip"]
            subprocess.run([*inside, "address", "add", f"{address}/24", "dev", name], check=True)
            for device in ("lo", name):
                subprocess.run([*inside, "link", "set", device, "up"], check=True)
        yield one, other
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _say(process: subprocess.Popen, line: str) -> None:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@pytest.mark.timeout(90)
def test_a_worker_on_another_host_joins_and_receives(hosts):
    sender, worker = hosts
    _say(sender, "go")
    _say(worker, "go")
    _say(worker, sender.stdout.readline())
    assert worker.stdout.readline() == "True\n"
    assert sender.stdout.readline() == "sent\n"
