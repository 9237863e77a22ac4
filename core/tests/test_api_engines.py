"""Entries of the built-in engines: governed arguments are refused in every spelling, images are those of the chart."""

import pytest

from rljob.api.engine_registry import ENGINES, image_of, refused
from rljob.manifests.inputs import COMPONENTS


@pytest.mark.parametrize(
    "arg", ["--port", "--port=80", "--max_model_len=5", "--max-model-l", "-tp", "--data-parallel-rpc-port", "--ssl-key"]
)
def test_a_governed_argument_is_refused_with_a_remedy(arg):
    (sentence,) = refused("vllm", ["--seed", "1", arg])
    assert sentence.startswith(f"args[2]: {arg!r} is governed by rljob (")
    assert sentence.endswith("; remove it")


@pytest.mark.parametrize(
    ("arg", "field"),
    [
        ("--tensor-parallel-size", "tensor"),
        ("-tp", "tensor"),
        ("--pipeline-parallel-size=2", "pipeline"),
        ("-pp", "pipeline"),
        ("--data-parallel-size", "data"),
        ("-dp", "data"),
    ],
)
def test_the_workers_of_an_engine_are_set_by_their_field(arg, field):
    (sentence,) = refused("vllm", [arg])
    assert sentence == f"args[0]: {arg!r} is governed by rljob (set parallelism.{field}); remove it"


@pytest.mark.parametrize("arg", ["--seed", "--model-impl", "--max-logprobs=5", "--quantization", "80", "-", "--"])
def test_other_arguments_pass(arg):
    assert list(refused("vllm", [arg])) == []


@pytest.mark.parametrize(
    ("arg", "remedy"),
    [
        ("--tp-size", "set parallelism.tensor"),
        ("--tensor-parallel-size=2", "set parallelism.tensor"),
        ("--context-len", "set maxModelLength"),
        ("--dp=2", "the workers of this engine share each layer; set parallelism.tensor or replicas"),
        ("--attn-dp-size", "the workers of this engine share each layer; set parallelism.tensor or replicas"),
        ("--dcp-size", "the workers of this engine share each layer; set parallelism.tensor or replicas"),
        ("--admin-api-key=k", "every server has a key of its own"),
        ("--skip-tokenizer-init", "always on: token ids go in and out"),
    ],
)
def test_arguments_of_sglang_that_rljob_sets_are_refused(arg, remedy):
    assert list(refused("sglang", [arg])) == [f"args[0]: {arg!r} is governed by rljob ({remedy}); remove it"]


@pytest.mark.parametrize("arg", ["--mem-fraction-static", "0.8", "--attention-backend", "--schedule-policy=fcfs"])
def test_other_arguments_of_sglang_pass(arg):
    assert list(refused("sglang", [arg])) == []


def test_the_image_of_a_built_in_engine_is_a_component_of_the_cluster_settings():
    assert image_of("vllm") == "rollout"
    assert {engine.image for engine in ENGINES.values()} <= {*COMPONENTS, ""}
    assert image_of("sglang") == "", "its pods run the image of the template"


def test_a_users_engine_has_neither_image_nor_governed_arguments():
    assert image_of("acme.engine:Adapter") == ""
    assert list(refused("acme.engine:Adapter", ["--port", "80"])) == []
