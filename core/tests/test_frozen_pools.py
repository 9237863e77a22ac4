"""Frozen pools: pools of engines that serve a model which is not trained, to the job's rewards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.tests.test_manifests import main_of, pod_of, roles, variables
from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.api.memory_checks import engine_problems, longest_sample
from rljob.api.model_shape import ModelShape
from rljob.api.resolve import resolve


@pytest.fixture
def judged(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with a judge in a frozen pool."""
    spec = manifest["spec"]
    spec["models"].append({"name": "big", "source": "job://big"})
    spec["rollouts"].append({"name": "judge", "model": "big", "maxModelLength": 64})  # below the answers of tasks
    spec["rewards"].append({"name": "clear", "builtin": "judge", "config": {"pool": "judge", "maxTokens": 16}})
    spec["tasks"][0]["moreRewards"] = [{"name": "clear"}]
    return manifest


def refusals(manifest: dict[str, Any]) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    return caught.value.problems


def test_a_pool_with_another_model_than_policy_is_frozen(judged: dict[str, Any]) -> None:
    spec = validate(judged).spec
    assert [pool.name for pool in spec.frozen_pools] == ["judge"]
    assert [pool.name for pool in spec.policy_pools] == ["main"]
    assert longest_sample(spec)[0] == "spec.rollouts[0].maxModelLength", "its sequences are no samples of the trainer"


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        (
            {"model": "small"},
            "spec.rollouts[1].model: 'small' is not defined; there are policy, big; name one of them, or add it to",
        ),
        (
            {"purpose": "evaluation"},
            "spec.rollouts[1].purpose: a pool with another model than policy serves rewards and loops",
        ),
        ({"engine": "sglang"}, "spec.rollouts[1].engine: sglang cannot serve a model to rewards and loops; set vllm"),
        ({"hostNetwork": True}, "spec.rollouts[1].hostNetwork: the engines of a pool with another model than policy"),
        ({"model": "policy"}, "spec.rewards[1].config.pool: 'judge' is no pool with a model of its own; there is none"),
    ],
)
def test_a_pool_that_cannot_serve_rewards_is_refused(
    judged: dict[str, Any], pool: dict[str, Any], sentence: str
) -> None:
    judged["spec"]["network"] = {"policy": "Disabled"}
    judged["spec"]["rollouts"][1] |= pool
    assert any(each.startswith(sentence) for each in refusals(judged))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"pool": "main"}, "spec.rewards[1].config.pool: 'main' is no pool with a model of its own; there are judge;"),
        ({"pool": "judge", "url": "http://judge"}, "spec.rewards[1].config: url and pool are given; give exactly one"),
        ({}, "spec.rewards[1].config: no judge is given; give exactly one of url, pool"),
        ({"pool": "judge", "model": "m"}, "spec.rewards[1].config: model has no meaning with pool"),
        ({"pool": "judge", "tokenVariable": "T"}, "spec.rewards[1].config: tokenVariable has no meaning with pool"),
        ({"url": "http://judge"}, "spec.rewards[1].config: model is required with url"),
        ({"pool": "judge", "maxTokens": 64}, "spec.rewards[1].config.maxTokens: 64 leaves no room for a prompt"),
    ],
)
def test_a_judge_is_one_pool_or_one_address(judged: dict[str, Any], config: dict[str, Any], sentence: str) -> None:
    judged["spec"]["rewards"][1]["config"] = {"maxTokens": 16} | config
    [found] = refusals(judged)
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"pool": "main"}, "spec.rewards[1].config.pool: 'main' is no pool with a model of its own; there are judge;"),
        ({"pool": "judge", "model": "/m"}, "spec.rewards[1].config: model and pool are given; give exactly one"),
        ({}, "spec.rewards[1].config: no model is given; give exactly one of model, pool"),
        ({"pool": "judge", "device": "cuda"}, "spec.rewards[1].config: device has no meaning with pool"),
        ({"pool": "judge", "maxTokens": 65}, "spec.rewards[1].config.maxTokens: 65 exceeds the maxModelLength 64 of"),
    ],
)
def test_a_reward_model_is_one_pool_or_one_directory(
    judged: dict[str, Any], config: dict[str, Any], sentence: str
) -> None:
    judged["spec"]["rewards"][1] |= {"builtin": "reward_model", "config": config}
    [found] = refusals(judged)
    assert found.startswith(sentence)


def test_a_reward_model_in_a_pool_needs_no_length(judged: dict[str, Any]) -> None:
    judged["spec"]["rewards"][1] |= {"builtin": "reward_model", "config": {"pool": "judge"}}
    validate(judged)
    judged["spec"]["rewards"][1]["config"]["maxTokens"] = 64
    validate(judged)


def test_a_job_needs_a_pool_for_training_besides_a_frozen_one(judged: dict[str, Any]) -> None:
    del judged["spec"]["rollouts"][0]
    assert "spec.rollouts: no pool is for training; set purpose: training in one of them" in refusals(judged)


def test_the_transport_of_weights_does_not_depend_on_a_frozen_pool(judged: dict[str, Any]) -> None:
    judged["spec"]["rollouts"][1]["accelerator"] = {"kind": "cpu"}
    found = resolve(validate(judged), "nvidia").spec
    assert found.weight_sync.transport == "nccl" and found.rollouts[1].dtype == "float32"


def test_the_memory_of_a_frozen_pool_is_that_of_its_own_model(judged: dict[str, Any]) -> None:
    spec = resolve(validate(judged), "nvidia").spec
    tiny, big = ModelShape(8, 8, 8, 1, 1, 1, 8), ModelShape(1 << 20, 1 << 14, 8, 1, 1, 1, 8)
    assert [*engine_problems(spec, {"policy": tiny}, 1 << 30)] == [], "a model that is not known is not checked"
    [found] = engine_problems(spec, {"policy": tiny, "big": big}, 1 << 30)
    assert found.startswith("spec.rollouts[1].dtype: the bfloat16 weights of ")


def secrets_of(role: Any) -> list[str]:
    volumes = pod_of(role)["spec"]["volumes"]
    return [item["key"] for volume in volumes for item in volume.get("secret", {}).get("items", [])]


def test_a_frozen_pool_has_a_service_and_a_token_of_its_own(judged: dict[str, Any]) -> None:
    judged["spec"]["rollouts"][1]["replicas"] = {"min": 2, "max": 3}
    found = roles(judged)
    role, usual = found["rollout-judge"], found["rollout-main"]
    one, each_engine = [each for each in role.objects if each["kind"] == "Service"]
    assert one["metadata"]["name"] == "sums-rollout-judge" and "clusterIP" not in one["spec"]
    assert each_engine["metadata"]["name"] == "sums-replicas-rollout-judge", "for the runner, which balances"
    assert each_engine["spec"]["clusterIP"] == "None", "its name has the address of each engine"
    labels = {"rljob.dev/job": "sums", "rljob.dev/role": "rollout-judge"}
    for service in (one, each_engine):
        assert service["spec"]["selector"] == labels, "engines of both Deployments"
        assert service["spec"]["ports"][0]["port"] == service["spec"]["ports"][0]["targetPort"] == 8080
    assert {each["kind"] for each in usual.objects} == {"Deployment", "PodDisruptionBudget"}
    assert role.desired == 2 and main_of(role)["command"] == main_of(usual)["command"]
    assert main_of(role)["image"] == main_of(usual)["image"]
    assert variables(role)["RLJOB_LISTEN"] == ":8080" and "RLJOB_LISTEN" not in variables(usual)
    assert (secrets_of(role), secrets_of(usual)) == (["pool"], ["agent"])
    assert main_of(role)["readinessProbe"]["exec"], "ready once its engine is: the Service has ready pods only"


def test_rewards_get_the_address_and_the_token_of_frozen_pools(judged: dict[str, Any]) -> None:
    found = roles(judged)
    for name in ("reward-clear", "reward-exact"):
        urls = json.loads(variables(found[name])["RLJOB_POOL_URLS"])
        assert urls == {"judge": ["http://sums-rollout-judge.default.svc.cluster.local:8080"]}
        assert variables(found[name])["RLJOB_POOL_TOKEN_FILE"] == "/etc/rljob/token/pool-token"
        assert secrets_of(found[name]) == ["reward", "pool"]


def test_the_runner_gets_the_engines_and_the_token_of_frozen_pools_for_loops(judged: dict[str, Any]) -> None:
    runner = roles(judged)["runner"]
    urls = json.loads(variables(runner)["RLJOB_POOL_URLS"])
    assert urls == {"judge": ["http://sums-replicas-rollout-judge.default.svc.cluster.local:8080"]}
    assert variables(runner)["RLJOB_POOL_TOKEN_FILE"] == "/etc/rljob/token/pool-token"
    assert secrets_of(runner) == ["runner", "reward", "pool"]


def test_runners_may_connect_to_frozen_pools_also_if_egress_is_listed(judged: dict[str, Any]) -> None:
    judged["spec"]["network"] = {"egress": {"policy": "Listed", "to": []}}
    policies = [each for each in roles(judged)["network"].objects if each["kind"] == "NetworkPolicy"]
    [pods] = [each["spec"] for each in policies if each["metadata"]["name"] == "sums-network-pods"]
    own = {"podSelector": {"matchLabels": {"rljob.dev/job": "sums"}}}
    assert pods["podSelector"] == own["podSelector"], "runner and engines"
    assert own in pods["ingress"][0]["from"] and "ports" not in pods["ingress"][0]
    assert own in pods["egress"][0]["to"] and "ports" not in pods["egress"][0]


def test_without_a_frozen_pool_nothing_changes(manifest: dict[str, Any]) -> None:
    """The Secret of a job of an older release has no key for pools: such a pod would never start."""
    for role in roles(manifest).values():
        assert "RLJOB_POOL" not in json.dumps(role.objects)
