"""Accelerator profiles: what they add to pods, what wins over them, and errors. Golden files have the shipped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.manifests import problems, render
from rljob.manifests.inputs import Cluster, RenderTarget, read_cluster
from rljob.protocol.environment import read_environment

PROFILE: dict[str, Any] = {
    "resource": "example.com/accelerator",
    "requestsPerGPU": {"cpu": "3", "memory": "10Gi"},
    "resourcesPerGPU": {"example.com/nic": 4},
    "resourcesPerPod": {"rdma/hca": 1},
    "nodeSelector": {"kind": "fast", "zone": "a"},
    "tolerations": [{"key": "reserved", "operator": "Exists"}],
    "env": {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"},
    "template": {
        "metadata": {"annotations": {"network": "fast"}},
        "spec": {
            "runtimeClassName": "fast",
            "initContainers": [{"name": "daemon", "image": "daemon:1", "restartPolicy": "Always"}],
            "containers": [{"name": "main", "env": [{"name": "PATH_OF_PLUGIN", "value": "/plugin"}]}],
        },
    },
}


def cluster(**settings: Any) -> Cluster:
    return read_cluster({"acceleratorProfiles": {"h100": PROFILE}, **settings})


def pod(manifest: dict[str, Any], where: Cluster, role: str = "trainer") -> dict[str, Any]:
    """Return the pod template of a role."""
    roles = {each.name: each for each in render(validate(manifest), RenderTarget(where))}
    found = [each["spec"]["template"] for each in roles[role].objects if "template" in each["spec"]]
    return dict(found[0])


def main(template: dict[str, Any]) -> dict[str, Any]:
    return next(dict(each) for each in template["spec"]["containers"] if each["name"] == "main")


def variables(template: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in main(template)["env"] if "value" in each}


@pytest.fixture
def profiled(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest whose trainer with two processes has the profile; its engines do not."""
    manifest["spec"]["trainer"] = {"processesPerNode": 2, "accelerator": {"profile": "h100"}}
    return manifest


def test_a_pod_requests_what_the_profile_needs_for_its_devices(profiled: dict[str, Any]) -> None:
    assert main(pod(profiled, cluster()))["resources"] == {
        "requests": {"cpu": "6", "memory": "20Gi"},
        "limits": {"example.com/accelerator": "2", "example.com/nic": "8", "rdma/hca": "1"},
    }


def test_a_pod_gets_nodes_tolerations_variables_sidecars_and_annotations(profiled: dict[str, Any]) -> None:
    template = pod(profiled, cluster())
    spec = template["spec"]
    assert spec["nodeSelector"] == {"kind": "fast", "zone": "a"} and spec["runtimeClassName"] == "fast"
    assert spec["tolerations"][-2:] == [
        {"key": "example.com/accelerator", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "reserved", "operator": "Exists"},
    ]
    assert [(each["name"], each["restartPolicy"]) for each in spec["initContainers"]] == [("daemon", "Always")]
    assert template["metadata"]["annotations"]["network"] == "fast"
    assert variables(template).items() >= {"NCCL_IB_HCA": "mlx5", "PATH_OF_PLUGIN": "/plugin"}.items()


def test_roles_without_the_profile_stay_as_they_were(profiled: dict[str, Any]) -> None:
    assert pod(profiled, cluster(), "rollout-main") == pod(
        profiled, cluster(acceleratorProfiles={"h100": {}}), "rollout-main"
    )
    assert "initContainers" not in pod(profiled, cluster(), "rollout-main")["spec"]


def test_the_job_wins_over_the_profile(profiled: dict[str, Any]) -> None:
    profiled["spec"]["trainer"] |= {
        "nccl": {"NCCL_DEBUG": "INFO"},
        "rdma": {"resource": "rdma/hca", "count": 8},
        "template": {
            "spec": {
                "nodeSelector": {"zone": "b"},
                "containers": [{"name": "main", "resources": {"limits": {"memory": "64Gi"}}}],
            }
        },
    }
    template = pod(profiled, cluster())
    assert template["spec"]["nodeSelector"] == {"kind": "fast", "zone": "b"}
    assert variables(template)["NCCL_DEBUG"] == "INFO"
    resources = main(template)["resources"]
    assert (resources["limits"]["rdma/hca"], resources["limits"]["memory"]) == ("8", "64Gi")
    assert resources["requests"] == {"cpu": "6"}


def test_a_limit_of_the_profile_replaces_the_request(profiled: dict[str, Any]) -> None:
    limited = {"template": {"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "9Gi"}}}]}}}
    resources = main(pod(profiled, cluster(acceleratorProfiles={"h100": limited})))["resources"]
    assert resources["requests"] == {"cpu": "4"} and resources["limits"]["memory"] == "9Gi"


@pytest.mark.parametrize("kind", ["auto", "nvidia"])
def test_a_role_with_a_profile_has_accelerators_also_where_the_default_is_the_cpu(
    profiled: dict[str, Any], kind: str
) -> None:
    profiled["spec"]["trainer"]["accelerator"]["kind"] = kind
    template = pod(profiled, cluster(accelerator="cpu"))
    assert main(template)["resources"]["limits"]["example.com/accelerator"] == "2"
    others = pod(profiled, cluster(accelerator="cpu"), "rollout-main")
    assert "limits" not in main(others)["resources"]


@pytest.mark.parametrize("role", ["trainer", "coordinator", "rollout-main"])
def test_all_components_agree_which_roles_have_accelerators(
    profiled: dict[str, Any], role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise they compare log-probabilities with the tolerances of other dtypes."""
    file = tmp_path / "job.json"
    file.write_text(validate(profiled).model_dump_json(by_alias=True))
    defaults = variables(pod(profiled, cluster(accelerator="cpu"), role))
    monkeypatch.setenv("RLJOB_JOB", str(file))
    monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
    monkeypatch.setenv("RLJOB_ACCELERATOR", defaults["RLJOB_ACCELERATOR"])
    spec = read_environment().job.spec
    assert (spec.trainer.accelerator.kind, spec.trainer.dtype) == ("nvidia", "bfloat16")
    assert (spec.rollouts[0].accelerator.kind, spec.rollouts[0].dtype) == ("cpu", "float32")
    assert spec.weight_sync.transport == "gloo"


def test_another_definition_of_a_profile_restarts_no_running_job(profiled: dict[str, Any]) -> None:
    def hashes(where: Cluster) -> list[str]:
        return [role.hash for role in render(validate(profiled), RenderTarget(where))]

    assert hashes(cluster()) == hashes(cluster(acceleratorProfiles={"h100": {}}))


def test_another_profile_restarts_the_pods_of_its_role_only(profiled: dict[str, Any]) -> None:
    where = cluster(acceleratorProfiles={"h100": {}, "a100": {}})
    before = {role.name: role.hash for role in render(validate(profiled), RenderTarget(where))}
    profiled["spec"]["trainer"]["accelerator"]["profile"] = "a100"
    after = {role.name: role.hash for role in render(validate(profiled), RenderTarget(where))}
    assert {name for name in before if before[name] != after[name]} == {"trainer"}


def test_an_unknown_profile_is_a_problem_that_names_the_known_ones(profiled: dict[str, Any]) -> None:
    profiled["spec"]["rollouts"] = [{"name": "main", "accelerator": {"profile": "h200"}}]
    job = validate(profiled)
    sentence = "spec.rollouts[0].accelerator.profile: the cluster has no profile h200; it has"
    assert problems(job, cluster(acceleratorProfiles={"h100": {}, "a100": {}})) == [f"{sentence} a100, h100"]
    assert problems(job, Cluster())[1] == f"{sentence} none (acceleratorProfiles of the chart)"
    assert problems(job) == [], "a client does not know the settings of the cluster"


def test_a_profile_of_a_role_on_the_cpu_is_rejected(profiled: dict[str, Any]) -> None:
    profiled["spec"]["trainer"]["accelerator"]["kind"] = "cpu"
    with pytest.raises(ManifestError, match=r"spec.trainer.accelerator.profile: a role on the CPU has no accelerator"):
        validate(profiled)


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        ({"resorce": "a/b"}, "acceleratorProfiles.h100.resorce: unknown field; remove it"),
        ({"resource": "gpu"}, "acceleratorProfiles.h100.resource: must"),
        ({"resourcesPerGPU": {"a/b": 0}}, "acceleratorProfiles.h100.resourcesPerGPU.a/b: must be at least 1"),
        ({"tolerations": [{"kye": "a"}]}, "spec.tolerations[0].kye: unknown field; did you mean key?"),
        ({"template": {"spec": {"container": []}}}, "spec.container: unknown field; did you mean containers?"),
    ],
)
def test_a_wrong_profile_is_rejected_by_the_name_of_its_field(profile: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        cluster(acceleratorProfiles={"h100": profile})
    assert sentence in str(error.value), str(error.value)
