"""Two nodes in separate network namespaces, like pods: the DNS name of the first node appears late for the second,
and each node's own name resolves to loopback, as on nodes of clusters (hostNetwork)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import logging, os, torch
from rljob.trainer import process_group
process_group.LOG_SECONDS = 0.0
logging.basicConfig(level="INFO", filename=f"{os.path.dirname(os.path.abspath(__file__))}/log{os.environ['RANK']}")
from rljob.trainer.process_group import join_world, leave_world
world = join_world()
total = world.sum_over_data(torch.tensor([1.0 + world.rank]))
print(f"rank {world.rank} of {world.size}: {total.item()}", flush=True)
leave_world()
"""
NODE = """
import subprocess, sys
from rljob.trainer import launch
rank, directory = int(sys.argv[1]), sys.argv[2]
sys.stdin.readline()  # wait until the cable exists
def run(*words): subprocess.run(words, check=True)
run("mount", "--bind", f"{directory}/hosts{rank}", "/etc/hosts")
run("hostname", f"node{rank}")
for words in (["link", "set", "lo", "up"], ["addr", "add", f"10.9.0.{rank + 1}/24", "dev", f"cable{rank}"],
              ["link", "set", f"cable{rank}", "up"]):
    run("ip", *words)
nodes = launch.Nodes(2, rank, "first.example:29500", f"10.9.0.{rank + 1}")
sys.exit(launch.launch([sys.executable, f"{directory}/rank.py"], 1, nodes))
"""
MACHINES = """
import os, subprocess, sys, time
directory = sys.argv[1]
def network(process): return os.readlink(f"/proc/{process}/ns/net")
def until(what):
    while not what():
        assert all(node.poll() is None for node in nodes)
        time.sleep(0.02)
def waits():  # rank 1, for a name that does not resolve yet
    try:
        with open(f"{directory}/log1") as log:
            return "waiting for rank 0" in log.read()
    except FileNotFoundError:
        return False
def run(*words): subprocess.run(["ip", *words], check=True)
run("link", "add", "switch", "type", "bridge")
run("link", "set", "switch", "up")
nodes = []
try:
    for rank in (1, 0):
        node = subprocess.Popen(["unshare", "--net", "--mount", "--uts", sys.executable, f"{directory}/node.py",
                                 str(rank), directory], stdin=subprocess.PIPE, text=True)
        nodes.append(node)
        until(lambda: network(node.pid) != network("self"))
        run("link", "add", f"port{rank}", "master", "switch", "type", "veth", "peer", f"cable{rank}", "netns",
            str(node.pid))
        run("link", "set", f"port{rank}", "up")
        node.stdin.write("\\n")
        node.stdin.flush()
    until(waits)
    with open(f"{directory}/hosts1", "a") as hosts:
        hosts.write("10.9.0.1 first.example\\n")
    sys.exit(max(node.wait(120) for node in nodes))
finally:
    for node in nodes:
        node.kill()
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2")
def test_two_machines_join_by_a_name_that_appears_late(tmp_path: Path) -> None:
    for name, text in {"rank.py": RANK, "node.py": NODE, "machines.py": MACHINES}.items():
        (tmp_path / name).write_text(text)
    for rank in range(2):
        (tmp_path / f"hosts{rank}").write_text(f"127.0.0.1 localhost\n127.0.1.1 node{rank}\n")
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [
            "unshare",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            sys.executable,
            str(tmp_path / "machines.py"),
            str(tmp_path),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Both write to one pipe, unbuffered: a line's end may come after the other's line.
    assert sorted(re.findall(r"rank \d of \d: [\d.]+\d", done.stdout)) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]
    assert "retry" not in done.stderr  # torch's own wait for a name would log many retries
