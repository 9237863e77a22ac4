"""Rendered environment services: the objects of rewards, with a token, an image and a program of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.tests.test_manifests import LONG, UID, main_of, objects, pod_of, roles, variables
from rljob.api.errors import ManifestError
from rljob.api.load import override, validate
from rljob.api.models import RLJob
from rljob.manifests import problems, render
from rljob.manifests.inputs import RenderTarget

OWN = {"spec": {"containers": [{"name": "main", "image": "maze:1"}]}}


@pytest.fixture
def acting(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with an environment that ships with rljob."""
    manifest["spec"]["environments"] = [{"name": "lake", "builtin": "frozen_lake"}]
    return manifest


def kinds(role: Any) -> list[tuple[str, str]]:
    return sorted((each["kind"], each["metadata"]["name"]) for each in role.objects)


def test_an_environment_has_the_objects_of_a_reward(acting: dict[str, Any]) -> None:
    acting["spec"]["environments"][0]["replicas"] = acting["spec"]["rewards"][0]["replicas"] = {"min": 2, "max": 4}
    found = roles(acting)
    assert [*found].index("environment-lake") == [*found].index("reward-exact") + 1
    of_reward = kinds(found["reward-exact"])
    renamed = sorted((kind, name.replace("reward-exact", "environment-lake")) for kind, name in of_reward)
    assert kinds(found["environment-lake"]) == renamed
    assert {kind for kind, _ in renamed} == {"Service", "Deployment", "PodDisruptionBudget", "RLJobScale"}
    role = found["environment-lake"]
    assert (role.kind, role.desired) == ("environment", 2)
    [headless] = [each for each in role.objects if each["metadata"]["name"] == "sums-replicas-environment-lake"]
    assert headless["spec"]["clusterIP"] == "None", "the runner asks for the addresses of the pods"
    more = roles(acting, RenderTarget(uid=UID, replicas={"environment-lake": 4}))["environment-lake"]
    assert more.desired == 4 and more.hash == role.hash


def test_the_pod_runs_the_service_of_rljob_with_its_own_token(acting: dict[str, Any]) -> None:
    found = roles(acting)
    lake, runner = found["environment-lake"], found["runner"]
    main = main_of(lake)
    assert (main["image"], main["command"]) == ("rljob-environments", ["python", "-m", "rljob.environments.main"])
    assert variables(lake)["RLJOB_NAME"] == "lake" and variables(lake)["RLJOB_LISTEN"] == ":8080"
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= main.keys()
    assert main["resources"] == main_of(found["reward-exact"])["resources"]
    secrets = {
        role.name: [
            item["key"]
            for volume in pod_of(role)["spec"]["volumes"]
            for item in volume.get("secret", {}).get("items", [])
        ]
        for role in (lake, runner)
    }
    assert secrets == {"environment-lake": ["environment"], "runner": ["runner", "reward", "environment"]}
    assert variables(runner)["RLJOB_ENVIRONMENT_TOKEN_FILE"] == "/etc/rljob/token/environment-token"
    urls = json.loads(variables(runner)["RLJOB_ENVIRONMENT_URLS"])
    assert urls == {"lake": "http://sums-replicas-environment-lake.default.svc.cluster.local:8080"}


def test_an_environment_outside_the_job_has_no_objects_and_gets_no_token(manifest: dict[str, Any]) -> None:
    """The Secret of a job of an older release has no key for environments: such a pod would never start."""
    without = roles(manifest)["runner"].objects
    manifest["spec"]["environments"] = [{"name": "far", "url": "http://far:1"}]
    found = roles(manifest)
    assert not any(name.startswith("environment") for name in found)
    assert json.loads(variables(found["runner"])["RLJOB_ENVIRONMENT_URLS"]) == {"far": "http://far:1"}
    assert "RLJOB_ENVIRONMENT_TOKEN_FILE" not in variables(found["runner"])
    assert pod_of(found["runner"])["spec"]["volumes"] == without[0]["spec"]["template"]["spec"]["volumes"]
    assert "RLJOB_ENVIRONMENT_URLS" not in json.dumps(without)


def test_a_container_of_the_user_serves_and_is_ready_when_it_listens(acting: dict[str, Any]) -> None:
    acting["spec"]["environments"].append({"name": "maze", "template": OWN, "local": {"command": ["./maze"]}})
    assert problems(validate(acting)) == []
    found = roles(acting)
    main = main_of(found["environment-maze"])
    assert main["image"] == "maze:1" and "command" not in main
    assert main["readinessProbe"]["tcpSocket"] == {"port": "http"} and "livenessProbe" not in main
    assert "requests" not in main.get("resources", {})
    [config] = found["config"].objects
    entries = RLJob.model_validate_json(config["data"]["job.json"]).spec.environments
    assert [(entry.name, entry.local is not None) for entry in entries] == [("lake", False), ("maze", True)]
    del acting["spec"]["environments"][1]["local"]
    [config] = roles(acting)["config"].objects
    assert json.loads(config["data"]["job.json"])["spec"]["environments"][1] == {"name": "maze", "template": {}}


def test_a_template_changes_the_pods_of_its_environment_only(acting: dict[str, Any]) -> None:
    before = roles(acting)
    acting["spec"]["environments"][0]["template"] = {"spec": {"nodeSelector": {"disk": "large"}}}
    after = roles(acting)
    assert {name for name in after if after[name].hash != before[name].hash} == {"environment-lake"}
    assert pod_of(after["environment-lake"])["spec"]["nodeSelector"] == {"disk": "large"}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"local": {"command": ["./maze"]}}, "spec.environments[0].local: is for rljob run; in a cluster give the"),
        ({"template": {"spec": {"nodeSelector": {"a": "b"}}}}, "spec.environments[0].template: has no image; set the"),
    ],
)
def test_an_environment_of_the_user_without_a_container_is_refused_in_a_cluster(
    manifest: dict[str, Any], entry: dict[str, Any], sentence: str
) -> None:
    manifest["spec"]["environments"] = [{"name": "maze", **entry}]
    [found] = problems(validate(manifest))
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("{name: a}", "environments[0]: no environment is given; give exactly one of builtin, function, url, local"),
        (
            "{name: a, url: 'http://a', template: {spec: {}}}",
            "environments[0].template: a service with url has no pod in the job; remove one of them",
        ),
        (
            "{name: a, builtin: sokoban, replicas: {min: 3, max: 2}}",
            "environments[0].replicas.max: 2 is less than min, 3; raise it or lower the other",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(manifest: dict[str, Any], change: str, sentence: str) -> None:
    override(manifest, f"spec.environments=[{change}]")
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    assert any(sentence in problem for problem in caught.value.problems), caught.value.problems


def test_names_of_the_longest_environment_and_reward_differ(manifest: dict[str, Any]) -> None:
    manifest["metadata"]["name"] = LONG
    manifest["spec"]["rewards"].append({"name": LONG, "builtin": "exact_match", "replicas": {"max": 2}})
    manifest["spec"]["environments"] = [{"name": LONG, "builtin": "frozen_lake", "replicas": {"max": 2}}]
    rendered = objects({role.name: role for role in render(validate(manifest), RenderTarget(uid=UID))})
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered]
    assert len(set(names)) == len(names)
