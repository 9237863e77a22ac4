"""Components can read the variables, the manifest and the commands of rendered pods."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from e2e.fields import place
from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.coordinator.rljob_client import job_ref_from_environment
from rljob.manifests import render
from rljob.manifests.inputs import RenderTarget
from rljob.protocol.environment import read_environment
from rljob.protocol.initializer_stamp import content_key
from rljob.trainer.launch import nodes_of

ROOT = Path(__file__).parents[1]
READ = {name for path in ROOT.glob("*/src/rljob/**/*.py") if "manifests" not in path.parts
        for name in re.findall(r"RLJOB_[A-Z_]+", path.read_text())}  # fmt: skip


def data():
    manifest = place.manifest()
    manifest["spec"]["initializer"] = {"command": ["rljob-example-model", "job://model"]}
    manifest["spec"]["trainer"] = {"nodes": 2, "processesPerNode": 2, "template": {"metadata": {"labels": {"a": "b"}}}}
    return manifest


def rendered():
    roles = render(validate(data()), RenderTarget(namespace="ns", uid="uid"))
    return [found for role in roles for found in role.objects]


def pods():
    """Return name and pod of every workload."""
    found = [each for each in rendered() if each["kind"] in ("Job", "Deployment", "StatefulSet")]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found}


def variables(pod):
    """Return what the container sees; of fields of the pod something."""
    made = {"RLJOB_NODE_RANK": "1"}
    return {entry["name"]: entry.get("value", made.get(entry["name"], "made")) for entry in pod["containers"][0]["env"]}


@pytest.fixture
def storage(tmp_path):
    (config,) = [each for each in rendered() if each["kind"] == "ConfigMap"]
    (tmp_path / "job.json").write_text(config["data"]["job.json"])
    (tmp_path / "token").write_text("secret")
    return tmp_path


@pytest.mark.parametrize("name", pods())
def test_every_variable_of_a_pod_is_read_by_a_component(name):
    told = {variable for variable in variables(pods()[name]) if variable.startswith("RLJOB_")}
    assert told and told <= READ


@pytest.mark.parametrize("name", pods())
def test_every_component_reads_its_environment(name, storage, monkeypatch):
    for variable, value in variables(pods()[name]).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("RLJOB_JOB", str(storage / "job.json"))
    if "RLJOB_TOKEN_FILE" in variables(pods()[name]):
        monkeypatch.setenv("RLJOB_TOKEN_FILE", str(storage / "token"))
    found = read_environment()
    assert found.instance == "made"
    for field in ("algorithm", "tasks", "training", "models"):
        assert getattr(found.job.spec, field) == getattr(resolve(validate(data())).spec, field)


def test_the_initializer_is_known_by_the_same_key_in_a_pod_and_here(storage, monkeypatch):
    monkeypatch.setenv("RLJOB_JOB", str(storage / "job.json"))
    monkeypatch.setenv("RLJOB_STORAGE", str(storage))
    assert content_key(read_environment().job) == content_key(resolve(validate(data())))


def test_the_coordinator_is_told_which_rljob_is_its_own(monkeypatch):
    for variable, value in variables(pods()["fields-coordinator"]).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    own = job_ref_from_environment()
    assert own is not None and (own.namespace, own.name, own.uid) == ("ns", "fields", "uid")


def test_the_trainers_nodes_are_told_where_to_meet():
    nodes = nodes_of(variables(pods()["fields-trainer-1"]))
    assert (nodes.count, nodes.rank) == (2, 1)
    assert nodes.address()[0] == "fields-trainer-1-0.fields-trainer.ns.svc.cluster.local"


@pytest.mark.parametrize("name", pods())
def test_what_a_pod_runs_exists(name):
    container = pods()[name]["containers"][0]
    commands = [container["command"]]
    commands += [probe["exec"]["command"] for key in container if "exec" in (probe := container[key])]
    for python, flag, module, *_ in commands:
        assert (python, flag) == ("python", "-m")
        assert importlib.util.find_spec(module) is not None
