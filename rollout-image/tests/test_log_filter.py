"""Which of vLLM's warnings are left out."""

import logging

import pytest

from rljob.rollout.vllm_engine.log_filter import RELOADING, Expected, leave_out_expected

FAILED = "%s: Failed to load weights"


@pytest.mark.parametrize(
    ("tied", "message", "layer", "logged"),
    [
        (True, FAILED, "RotaryEmbedding", False),
        (False, FAILED, "Llama3RotaryEmbedding", False),
        (True, FAILED, "ParallelLMHead", False),
        (False, FAILED, "ParallelLMHead", True),
        (True, FAILED, "QKVParallelLinear", True),
        (True, "%s: something else", "RotaryEmbedding", True),
    ],
)
def test_only_layers_that_no_weights_are_sent_for_are_not_warned_of(tied, message, layer, logged):
    record = logging.LogRecord(RELOADING, logging.WARNING, "", 0, message, (layer,), None)
    assert Expected(tied).filter(record) is logged


def test_the_filter_is_there_once():
    logger = logging.getLogger(RELOADING)
    try:
        for _ in range(2):
            leave_out_expected(tied=True)
        assert len(logger.filters) == 1
    finally:
        logger.filters.clear()
