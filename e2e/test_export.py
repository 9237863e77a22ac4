"""`rljob export` copies the trainer's checkpoint to a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from core.tests.checkpoint_ledger import keep_checkpoints
from e2e.fakes.model import write_model
from rljob.local import checkpoints
from rljob.local.run_directory import RunDirectory
from rljob.protocol.checkpoint_record import TrainerState
from rljob.trainer.backends.base import SavedState
from rljob.trainer.checkpoint import CheckpointStore, read_configuration
from rljob.trainer.process_group import World


def test_an_exported_checkpoint_is_the_model_that_was_trained(tmp_path: Path) -> None:
    source, storage, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    write_model(source)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=0
    )
    config.num_key_value_heads = 2
    trained = Qwen2ForCausalLM(config)
    trained.save_pretrained(source)
    GenerationConfig(eos_token_id=0, temperature=0.5, do_sample=True).save_pretrained(source)
    (source / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )
    with torch.no_grad():
        trained.model.norm.weight.mul_(1.5)  # a step of training
    weights = {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}
    moments = {f"exp_avg.{name}": tensor for name, tensor in weights.items()}
    state = TrainerState(step=7, updates=7, incarnation=1, versions={}, files={})
    alone = World(0, 1, torch.device("cpu"), None, 0, 1)  # type: ignore[arg-type]
    CheckpointStore(storage).write(alone, state, read_configuration(source), SavedState(weights, moments))
    keep_checkpoints(storage, {7: state.digest})

    checkpoint = checkpoints.find(RunDirectory(storage), None)
    checkpoints.export(checkpoint, out)

    assert checkpoint.step == 7
    assert not {"trainer", "trainer.json"} & {path.name for path in out.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(10)[None]
    assert torch.equal(loaded(ids).logits, trained(ids).logits)
    assert loaded.generation_config.temperature == 0.5
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode("7 + 5")) == "7 + 5"
    assert tokenizer.eos_token_id == 0
