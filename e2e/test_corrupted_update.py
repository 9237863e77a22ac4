"""One bucket of an update is corrupted on its way to an engine with requests in flight: no token that the corrupted
weights gave is in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from e2e.extensions.workspace import Run, Workspace
from e2e.fakes.model import STOP, write_model
from e2e.fakes.tiny import VOCABULARY
from rljob.ledger.reader import LedgerReader
from rljob.ledger.sample_detail import SampleDetail, show

STEPS = 4
TOLERANCE = 1e-4
FIELDS: dict[str, dict[str, Any]] = {
    "training": {"steps": STEPS, "maxStaleness": 1},
    "models": {"source": "qwen2"},
    "rewards": {"builtin": None, "function": "mypackage.reward:short", "config": {"limit": 40}},
    "trainer": {"backend": "fsdp", "optimizer": {"learningRate": 0.001}},
    "checkpoints": {"everySteps": 1, "keep": STEPS + 1},
}


def samples_of(run: Run) -> list[SampleDetail]:
    """Return all samples of the ledger, with the tokens of each."""
    with LedgerReader(run.directory) as ledger:
        names = [name for (name,) in ledger.rows("SELECT id FROM samples WHERE state = 'trained'")]
        return [show(ledger, name) for name in names]


def check_failed_update(run: Run) -> list[SampleDetail]:
    """Assert that one update failed with requests in flight; return the samples."""
    logs = "".join(log.read_text() for log in run.directory.glob("logs/*.log"))
    assert logs.count("a bucket was corrupted") == 1
    assert "received other bytes than were sent" in logs
    samples = samples_of(run)
    crossing = [s for s in samples if {0, 1} <= {token.version for turn in s.turns for token in turn.written}]
    assert crossing, "no sample was in flight at the corrupted update"
    return samples


@pytest.mark.parametrize(
    ("engine", "length"),
    [
        ("CorruptTorch", 60),
        pytest.param("CorruptVllm", 200, marks=[pytest.mark.engine, pytest.mark.timeout(300)]),
    ],
)
def test_no_token_of_corrupted_weights_is_in_the_ledger(tmp_path: Path, engine: str, length: int) -> None:
    workspace = Workspace(tmp_path)
    write_policy(tmp_path / "qwen2")
    pool = {"engine": f"corrupt.engine:{engine}", "maxModelLength": 256, "maxConcurrency": 4}
    task = {"sampling": {"maxTokens": length}}
    run = workspace.run("corrupted", **FIELDS, tasks=task, rollouts=pool | {"kvCacheBytes": 1 << 25}).check()
    places = {step: run.directory / f"checkpoints/step-{step:06d}" for step in range(1, STEPS)}
    models = {step: load(place) for step, place in (places | {0: tmp_path / "qwen2"}).items()}
    for sample in check_failed_update(run):
        for turn in sample.turns:
            tokens_T = torch.tensor([*turn.given_ids, *(token.id for token in turn.written)])
            for version in {token.version for token in turn.written}:
                with torch.no_grad():
                    logprobs_TV = models[version](tokens_T[None]).logits[0].log_softmax(-1)
                for place, token in enumerate(turn.written, start=len(turn.given_ids)):
                    if token.version == version:
                        assert token.logprob == pytest.approx(float(logprobs_TV[place - 1, token.id]), abs=TOLERANCE)


def write_policy(directory: Path) -> None:
    """Write a model with attention heads of a size that vLLM has on a CPU."""
    write_model(directory)
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1, eos_token_id=STOP,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)


def load(place: Path) -> Qwen2ForCausalLM:
    """Return the model in a directory."""
    return Qwen2ForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
