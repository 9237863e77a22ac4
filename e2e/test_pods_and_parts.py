"""What pods are given is what parts read, and what pods run is there."""

import importlib.util
import re
from pathlib import Path

import pytest

from core.tests.goldens import CONTEXTS, JOB
from rljob.api.load import load
from rljob.api.pods import main_container
from rljob.manifests import render
from rljob.protocol import environment

ROOT = Path(__file__).parents[1]
SOURCES = {
    "coordinator": "coordinator/src/rljob/coordinator",
    "runner": "coordinator/src/rljob/runner",
    "trainer": "trainer-image/src/rljob/trainer",
    "initializer": "trainer-image/src/rljob/trainer",
    "rollout-main": "rollout-image/src/rljob/rollout",
    "reward-gym": "reward-services/src/rljob/rewards",
}
EVERYWHERE = "core/src/rljob/protocol"
ELSEWHERE = {"RLJOB_TOKEN", "RLJOB_LOG_LEVEL", "RLJOB_SERVICE_ACCOUNT"}
"""Of `rljob run`; for a person's template; for tests."""
OF_THE_TRAINER = {"RLJOB_NODES", "RLJOB_NODE_RANK", "RLJOB_MASTER", "RLJOB_RENDEZVOUS_ID"}
"""Read in the trainer's sources, but not by the initializer, which is there too; and the other way round."""
OF_THE_INITIALIZER = {"RLJOB_SEED"}


def containers():
    """Return role → its main container."""
    found = {}
    for role in render(load(JOB), CONTEXTS["gpu"]):
        for made in role.objects:
            if "template" in made.get("spec", {}):
                found[role.name] = main_container(made["spec"]["template"])
    return found


def read_in(directory):
    text = "".join(path.read_text() for path in (ROOT / directory).rglob("*.py"))
    imports = " ".join(re.findall(r"from rljob\.protocol\.environment import (\([^)]*\)|.*)", text))
    named = {vars(environment)[name] for name in re.findall(r"\b[A-Z_]+\b", imports)}
    return named | set(re.findall(r"RLJOB_[A-Z]+(?:_[A-Z]+)*", text))


@pytest.mark.parametrize("role", SOURCES)
def test_a_pod_is_given_what_its_part_reads(role):
    given = {entry["name"] for entry in containers()[role]["env"]}
    wanted = read_in(SOURCES[role]) - ELSEWHERE
    wanted -= {"trainer": OF_THE_INITIALIZER, "initializer": OF_THE_TRAINER}.get(role, set())
    assert wanted - given == set()


def test_nothing_is_given_that_no_part_reads():
    known = read_in(EVERYWHERE).union(*map(read_in, SOURCES.values()))
    given = {entry["name"] for container in containers().values() for entry in container["env"]}
    assert {name for name in given if name.startswith("RLJOB_")} <= known


@pytest.mark.parametrize("role", SOURCES)
def test_what_a_pod_runs_is_there(role):
    container = containers()[role]
    looks = [container[probe]["exec"]["command"] for probe in ("livenessProbe",) if "exec" in container.get(probe, {})]
    for command in (container["command"], *looks):
        assert command[:2] == ["python", "-m"]
        assert importlib.util.find_spec(command[2]) is not None
