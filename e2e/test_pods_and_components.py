"""Rendered pods set exactly the variables that components read, and run modules that exist."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from core.tests.goldens import CONTEXTS, JOB
from rljob.api.load import load
from rljob.api.pod_models import main_container
from rljob.manifests import render

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
VARIABLE = re.compile(r"RLJOB_[A-Z]+(?:_[A-Z]+)*")
ELSEWHERE = {
    "RLJOB_TOKEN",  # of `rljob run`
    "RLJOB_LOG_LEVEL",  # for a person's template
    "RLJOB_SERVICE_ACCOUNT",  # for tests
    "RLJOB_SGLANG_PYTHON",  # for tests
    "RLJOB_SGLANG_KEY",  # of an engine's agent to the server that it starts
    "RLJOB_AGENT_SEED",  # of the runner to the command of a task's agent
}
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
    return set().union(*(read_by(ast.parse(path.read_text())) for path in (ROOT / directory).rglob("*.py")))


def read_by(module):
    """Return the variables whose names a module uses, or whose constants: its own or of rljob.protocol.

    The definition of a constant is no use, and neither is a text that holds more than the name.
    """
    constants, definitions = {}, []
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rljob.protocol."):
            imported = importlib.import_module(node.module)
            constants |= {alias.asname or alias.name: getattr(imported, alias.name) for alias in node.names}
    for node in module.body:
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
            for name, value in pairs:
                if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                    definitions.append(value)
                    constants[name.id] = value.value
    used = [node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and node not in definitions]
    used += [constants.get(n.id) for n in ast.walk(module) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return {value for value in used if isinstance(value, str) and VARIABLE.fullmatch(value)}


@pytest.mark.parametrize("role", SOURCES)
def test_a_pod_is_given_what_its_component_reads(role):
    given = {entry["name"] for entry in containers()[role]["env"]}
    wanted = read_in(SOURCES[role]) - ELSEWHERE
    wanted -= {"trainer": OF_THE_INITIALIZER, "initializer": OF_THE_TRAINER}.get(role, set())
    assert wanted - given == set()


def test_the_definition_of_a_constant_is_no_read_and_its_use_is_one():
    defined = 'A, B = "RLJOB_A", "RLJOB_B"\nC = "RLJOB_C"\n'
    assert read_by(ast.parse(defined)) == set()
    assert read_by(ast.parse(f'{defined}"RLJOB_D is set"; get(A, C, "RLJOB_E")')) == {"RLJOB_A", "RLJOB_C", "RLJOB_E"}
    assert read_by(ast.parse("from rljob.protocol.environment import NODES, SEED\nget(SEED)")) == {"RLJOB_SEED"}


def test_nothing_is_given_that_no_component_reads():
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
