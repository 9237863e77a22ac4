"""Arguments of an engine's server that rljob gives itself are refused, in every spelling vLLM would take."""

import pytest

from rljob.api.engine_args import refused


@pytest.mark.parametrize(
    "arg", ["--port", "--port=80", "--max_model_len=5", "--max-model-l", "-tp", "--data-parallel-size", "--ssl-keyfile"]
)
def test_a_governed_argument_is_refused_with_what_to_do(arg):
    (sentence,) = refused("vllm", ["--seed", "1", arg])
    assert sentence.startswith(f"args[2]: {arg!r} is governed by rljob (")
    assert sentence.endswith("; remove it")


@pytest.mark.parametrize("arg", ["--seed", "--model-impl", "--max-logprobs=5", "--quantization", "80", "-", "--"])
def test_other_arguments_pass(arg):
    assert list(refused("vllm", [arg])) == []
