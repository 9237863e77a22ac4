"""Expected warnings of an engine are dropped, others are not."""

import logging

import pytest

from rljob.rollout.adapters.vllm.expected_warnings import RELOADING, is_reload_warning
from rljob.rollout.log_filter import drop_records

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
def test_only_warnings_about_layers_without_weights_are_expected(tied, message, layer, logged):
    record = logging.LogRecord(RELOADING, logging.WARNING, "", 0, message, (layer,), None)
    assert is_reload_warning(record, tied) is not logged


def test_a_later_call_replaces_the_filter(caplog):
    logger = logging.getLogger("test-of-drop-records")
    drop_records(logger.name, lambda record: "one" in record.msg)
    drop_records(logger.name, lambda record: "two" in record.msg)
    logger.warning("one")
    logger.warning("two")
    assert caplog.messages == ["one"]
