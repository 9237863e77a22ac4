"""The benchmark on GPUs without a GPU: its jobs, its arithmetic and its arguments."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu import SIZES, Run, make_tokenizer, manifest, operations, runs_of
from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.local.gpu_assignment import assign, kind_of, problems
from rljob.protocol.gpus import Gpu

H200 = [Gpu(str(i), i, f"GPU-{i}", 141 << 30, "NVIDIA H200") for i in range(2)]


@pytest.mark.parametrize("run", ["fsdp:0", "megatron:1"])
def test_with_one_gpu_both_roles_name_it_and_with_two_each_is_assigned_one(run, tmp_path):
    assigned = []
    for gpus in (H200[:1], H200):
        job = load(manifest(SIZES["1.5B"], tmp_path, 20, runs_of(run)[0], gpus), gpus)
        assert not list(problems(job, gpus))
        assigned.append({name: [gpu.visible_as for gpu in found] for name, found in assign(job, gpus).items()})
    assert assigned == [{}, {"trainer": ["0"], "rollout-main-0": ["1"]}]


def test_the_operations_are_those_that_torch_counts():
    size = SIZES["tiny"]
    model = Qwen2ForCausalLM(Qwen2Config(**size.configuration, tie_word_embeddings=True, attn_implementation="eager"))
    length = 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(3, length, dtype=torch.long)).logits.sum().backward()
    c = size.configuration
    above_the_diagonal = 3 * 6 * c["num_hidden_layers"] * c["hidden_size"] * length**2  # computed, and masked
    assert operations(size, 3, 0, length) + above_the_diagonal == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_the_tokenizer_has_an_entry_for_each_token_of_the_model():
    tokenizer = make_tokenizer(1024)
    ids = tokenizer("some text")["input_ids"]
    assert len(tokenizer) == 1024 and tokenizer.eos_token_id == 1023
    assert tokenizer.decode(ids) == "some text"


def test_the_runs_are_a_backend_and_a_staleness():
    assert runs_of("fsdp:0,megatron:2") == [Run("fsdp", 0), Run("megatron", 2)]
    for wrong in ("fsdp", "deepspeed:1", "fsdp:-1", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a backend"):
            runs_of(wrong)


def test_the_kept_result_names_the_device_and_its_mfu_follows_from_its_times():
    figures = json.loads(Path("benchmarks/results/gpu.json").read_text())["figures"]
    assert figures["device"] == "NVIDIA H200"
    size = SIZES["1.5B"]
    for run in ("fsdp_0", "fsdp_1", "megatron_0"):
        seconds = sum(figures[f"{name}_seconds_{run}"] for name in ("forward", "backward", "optimizer"))
        answer = figures[f"answer_tokens_{run}"] / 256
        found = operations(size, 256, 64, answer) / seconds / 989e12
        assert math.isclose(found, figures[f"mfu_{run}"], rel_tol=0.05)


def load(given, gpus):
    return resolve(validate(given), kind_of(gpus))
