"""Memory that a job needs."""

import pytest

from rljob.api.engine_registry import cpu_cache_bytes
from rljob.api.load import validate
from rljob.api.memory_checks import frozen_names
from rljob.api.resolve import resolve
from rljob.local import capacity
from rljob.local.memory_needs import Sizes, memory_needs


def needs_of(job, **others):
    return memory_needs(job, "source", Sizes({"policy": 1000}, **others), 1 << 40)


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        ({}, cpu_cache_bytes("vllm")),
        ({"engine": "acme.engine:Adapter"}, 0),
        ({"engine": "acme.engine:Adapter", "kvCacheBytes": 1 << 20}, 1 << 20),
    ],
)
def test_the_cache_of_an_unknown_engine_counts_only_if_kv_cache_bytes_is_set(manifest, pool, size):
    manifest["spec"]["rollouts"][0] |= pool
    caches = [need.size for need in needs_of(resolve(validate(manifest))) if "caches" in need.what]
    assert caches == [size]
    assert cpu_cache_bytes("vllm") == 256 << 20


def test_each_replica_of_an_engine_holds_the_weights_and_each_worker_a_cache(manifest):
    manifest["spec"]["rollouts"][0] |= {
        "replicas": {"min": 3},
        "kvCacheBytes": 1 << 20,
        "parallelism": {"tensor": 2, "pipeline": 2, "data": 5},
    }
    _, cache, weights = needs_of(resolve(validate(manifest)))
    assert (cache.size, weights.size) == (3 * 20 << 20, 3 * 5 * 4 * 1000)


@pytest.mark.parametrize(("dtype", "each"), [("float32", 28), ("bfloat16", 30)])
def test_a_trainer_on_cpu_holds_its_state_gradients_and_a_checkpoint(manifest, dtype, each):
    """Bytes a parameter: weights, gradients and two moments, the copy of a checkpoint, weights in bfloat16."""
    manifest["spec"]["trainer"] = {**manifest["spec"].get("trainer", {}), "dtype": dtype}
    assert needs_of(resolve(validate(manifest)))[0].size == each * 1000


def test_a_trainer_on_cpu_holds_each_model_that_is_not_trained_once(manifest, tmp_path, monkeypatch):
    manifest["spec"]["models"] = [
        {"name": "policy", "source": "job://model"},
        {"name": "big", "source": "job://big"},
    ]
    manifest["spec"]["algorithm"] = {"klCoefficient": 0.1, "referenceModel": "big", "teachers": [{"model": "big"}]}
    job = resolve(validate(manifest))
    sizes = {tmp_path / "model": 1000, tmp_path / "big": 5000}
    monkeypatch.setattr(capacity, "count_parameters", sizes.__getitem__)
    frozen = capacity._parameters_of(frozen_names(job.spec), job, tmp_path)
    assert frozen == 5000
    _, need, *_ = needs_of(job, frozen=frozen)
    assert (need.size, need.what) == (4 * 5000, "the 5,000 parameters of the reference and teacher models")


def test_a_critic_needs_as_much_as_a_trained_policy_in_memory_and_on_the_disk(manifest, tmp_path, monkeypatch):
    manifest["spec"]["algorithm"] = {"preset": "ppo"}
    job = resolve(validate(manifest))
    _, need, *_ = needs_of(job, critic=1000)
    assert (need.size, need.advice) == (28_000, "choose a smaller model in spec.algorithm.criticModel")
    asked: list[int] = []
    monkeypatch.setattr(capacity, "count_parameters", lambda path: 1000)
    monkeypatch.setattr(capacity, "_check_disk", lambda job, storage, parameters: asked.append(parameters))
    capacity.check(job, tmp_path)
    assert asked == [2000]
