"""Megatron-Core in several layouts gives what transformers gives in one process, and its checkpoints fit all of them.

Every layout trains three steps on the CPU: log-probabilities and gradients of the first, weights after the third.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.api.models import RLJob
from rljob.protocol.checkpoint_record import TrainerState
from rljob.trainer.backends.base import Output
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.backends.megatron import supported_layouts
from rljob.trainer.batch import Microbatch, Row, collate
from rljob.trainer.checkpoint import CheckpointStore, read_configuration
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.process_group import World

THOROUGH = bool(os.environ.get("RLJOB_THOROUGH"))  # make thorough; four processes take half a minute
STEPS = 3
VOCABULARY = 61  # odd: two tensor-parallel ranks pad it
OPTIMIZER: dict[str, Any] = {"learningRate": 1e-2, "maxGradNorm": 0.5, "epsilon": 1e-3, "weightDecay": 0.1}
OPTIMIZER |= {"warmupSteps": 2, "betas": [0.8, 0.95]}
ROWS = (3, 1, 2, 2, 1)
ENTROPY = 0.1


def microbatches(seed: int) -> list[Microbatch]:
    """Return five microbatches of rows of different lengths, whose masks have holes. Neither stages nor replicas divide
    their number."""
    generator = torch.Generator().manual_seed(seed)

    def row() -> Row:
        length = int(torch.randint(4, 18, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).numpy()
        mask = (torch.rand(length, generator=generator) < 0.6).numpy()
        mask[:2] = False
        mask[-1] = True
        return Row(ids, torch.zeros(length).numpy(), mask, torch.zeros(length).numpy())

    return [collate([row() for _ in range(rows)], [0.7, 1.0, 1.3][:rows], torch.device("cpu")) for rows in ROWS]


def microbatches_of(world: World, seed: int) -> list[Microbatch]:
    """Return the microbatches of this rank's replica; all replicas have equally many, so some may have no row."""
    own = microbatches(seed)[world.dp_rank :: world.dp_size]
    missing = -(-len(ROWS) // world.dp_size) - len(own)
    return own + [collate([], [], world.device)] * missing


def loss(microbatch: Microbatch, output: Output) -> torch.Tensor:
    """Return a weighted sum of log-probabilities and entropies; the weights have both signs."""
    assert output.entropy_BK is not None
    weights_BK = torch.linspace(-1, 2, microbatch.targets_BK.numel()).view_as(microbatch.targets_BK) / 20
    values_BK = weights_BK * output.logprobs_BK + ENTROPY * output.entropy_BK
    return -values_BK.where(microbatch.mask_BK, 0.0).sum()


def reference(source: Path) -> dict[str, Any]:
    """Return log-probabilities and gradients of the first step, norms, and the weights after three, by transformers in
    float64: what differs is the rounding of the backend alone."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    decay, epsilon = OPTIMIZER["weightDecay"], OPTIMIZER["epsilon"]
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=decay, eps=epsilon, betas=OPTIMIZER["betas"])
    result: dict[str, Any] = {"logprobs": [], "norms": [], "masks": [batch.mask_BK for batch in microbatches(0)]}
    for step in range(STEPS):
        for microbatch in microbatches(step):
            mask_BL = torch.ones_like(microbatch.token_ids_BL)
            logits_BLV = model(microbatch.token_ids_BL, attention_mask=mask_BL).logits
            scaled_BKV = logits_BLV[:, microbatch.keep_K] / microbatch.temperature_B[:, None, None]
            all_BKV = torch.log_softmax(scaled_BKV, -1)
            logprobs_BK = all_BKV.gather(-1, microbatch.targets_BK.unsqueeze(-1)).squeeze(-1)
            entropy_BK = -(all_BKV.exp() * all_BKV).sum(-1)
            loss(microbatch, Output(logprobs_BK, entropy_BK)).backward()
            if step == 0:
                result["logprobs"].append(logprobs_BK.detach())
        if step == 0:
            result["gradients"] = in_files({name: p.grad.clone() for name, p in model.named_parameters()})
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["maxGradNorm"])))
        adamw.param_groups[0]["lr"] = OPTIMIZER["learningRate"] * min(1.0, (step + 1) / OPTIMIZER["warmupSteps"])
        adamw.step()
        adamw.zero_grad()
    result["weights"] = in_files({name: p.detach().clone() for name, p in model.named_parameters()})
    return result


def in_files(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model of transformers as its files have them: one for each expert."""
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.partition(".experts.")
        for expert, content in enumerate(tensor if kind else ()):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for each, part in zip(names, content.chunk(len(names)), strict=True):
                found[f"{layer}.experts.{expert}.{each}.weight"] = part
        if not kind:
            found[name] = tensor
    return found


def start(world: World, source: Path, job: RLJob) -> Any:
    """Return the backend in the job's layout; an earlier layout of this process is taken down."""
    from rljob.trainer.backends.megatron.megatron_backend import MegatronBackend
    from rljob.trainer.backends.megatron.megatron_library import parallel_state

    parallel_state.destroy_model_parallel()
    return MegatronBackend(source, job.spec.trainer, world)


def train_step(backend: Any, step: int) -> dict[str, Any]:
    """Train one step on the microbatches of this replica; return its log-probabilities, gradients and norm."""
    world = backend.world
    own = microbatches_of(world, step)
    outputs = backend.run(own, lambda i, output: loss(own[i], output), entropy=True)
    gradients: dict[str, Any] = {}
    if step == 0:
        gradients = summed_gradients(backend)
    update = backend.update(step)
    logprobs = [output.logprobs_BK.numpy() for output, each in zip(outputs, own, strict=True) if each.mask_BK.any()]
    return {"logprobs": logprobs, "gradients": gradients, "norm": update.norm, "replica": world.dp_rank}


def summed_gradients(backend: Any) -> dict[str, Any]:
    """Return the gradients of all replicas as whole tensors (rank 0), before the optimizer exchanges them."""
    grid, parameters = backend._grid, backend._network.parameters

    def part(name: str) -> torch.Tensor:
        gradient = parameters[name].main_grad.clone()
        of_all = getattr(parameters[name], "allreduce", True)
        torch.distributed.all_reduce(gradient, group=grid.copy_group if of_all else grid.expert_copy_group)
        of_positions = grid.tensor_size > 1 and getattr(parameters[name], "sequence_parallel", False)
        if of_positions or name.endswith(("q_layernorm.weight", "k_layernorm.weight")):  # the latter: of its heads
            torch.distributed.all_reduce(gradient, group=grid.tensor_group)
        if getattr(parameters[name], "shared_embedding", False):  # the first and the last stage have a copy each
            from rljob.trainer.backends.megatron.megatron_library import parallel_state

            torch.distributed.all_reduce(gradient, group=parallel_state.get_embedding_group())
        return gradient

    if grid.stages > 1 and grid.is_last and "output_layer.weight" in parameters:
        last = parameters["output_layer.weight"]
        if getattr(last, "shared_embedding", False):  # meets the first stage's sum above
            part("output_layer.weight")
    found = backend._network.exchange.whole_tensors(part, torch.float32, torch.device("cpu"))
    return {name: tensor.numpy().copy() for name, tensor in found if tensor.numel()}


def whole(backend: Any) -> dict[str, Any]:
    """Return the weights (rank 0)."""
    return {name: tensor.numpy().copy() for name, tensor in backend.named_tensors() if tensor.numel()}


def train_models(world: World, sources: dict[str, Path], jobs: Sequence[RLJob], storage: Path) -> dict[str, Any]:
    """Return the results of :func:`train_layouts` for each model."""
    return {kind: train_layouts(world, source, jobs, storage / kind) for kind, source in sources.items()}


def train_layouts(world: World, source: Path, jobs: Sequence[RLJob], storage: Path) -> list[dict[str, Any]]:
    """Train three steps in each layout and write a checkpoint after two; resume the first layout's in all of them."""
    results = []
    for number, job in enumerate(jobs):
        backend = start(world, source, job)
        before = [output.logprobs_BK for output in backend.run(microbatches(0)[:1], None)]
        steps = [train_step(backend, step) for step in range(STEPS - 1)]
        state = TrainerState(STEPS - 1, backend.updates, 1, {}, {})
        store = CheckpointStore(storage / str(number))
        store.write(backend.world.with_own_control(), state, read_configuration(source), backend.save())
        steps.append(train_step(backend, STEPS - 1))
        results.append({"steps": steps, "weights": whole(backend), "before": before[0].numpy()})
    for job, result in zip(jobs, results, strict=True):
        checkpoint = CheckpointStore(storage / "0").path(STEPS - 1)
        backend = start(world, checkpoint, job)
        backend.load(checkpoint)
        result["loaded"] = whole(backend)
        train_step(backend, STEPS - 1)
        result["resumed"] = whole(backend)
    return results


def small_model(directory: Path, kind: str, tied: bool, **others: Any) -> Path:
    """Write a small model of a kind; return the directory. ``others``: further fields of its configuration."""
    torch.manual_seed(9)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
    if tied:  # one frequency stays, one is interpolated, two are divided
        scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0}
        sizes["rope_parameters"] = scaling | {"rope_type": "llama3", "original_max_position_embeddings": 32}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    config = AutoConfig.for_model(kind, tie_word_embeddings=tied, initializer_range=0.1, **sizes | others)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms whose parts differ
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def compare(expected: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Compare the results of all ranks in one layout with those of transformers."""
    replicas = 1 + max(rank["steps"][0]["replica"] for rank in ranks)
    masked = [theirs.where(mask, 0.0) for theirs, mask in zip(expected["logprobs"], expected["masks"], strict=True)]
    for rank in ranks:
        replica = rank["steps"][0]["replica"]
        given = rank["steps"][0]["logprobs"]
        for ours, theirs, mask in zip(
            given, masked[replica::replicas], expected["masks"][replica::replicas], strict=True
        ):
            torch.testing.assert_close(torch.tensor(ours).where(mask, 0.0).double(), theirs, rtol=0, atol=2e-6)
        before = torch.tensor(rank["before"]).where(expected["masks"][0], 0.0)
        torch.testing.assert_close(before.double(), masked[0], rtol=0, atol=2e-6)
        assert [step["norm"] for step in rank["steps"]] == pytest.approx(expected["norms"], rel=2e-5)
    gradients, weights = ranks[0]["steps"][0]["gradients"], ranks[0]["weights"]
    assert gradients.keys() == weights.keys() == expected["weights"].keys()
    for name, theirs in expected["gradients"].items():
        assert float((torch.tensor(gradients[name]) - theirs).norm() / theirs.norm()) <= 2e-5, name
    for name, theirs in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(weights[name]).double(), theirs, rtol=0, atol=1e-5)


def resume_by_fsdp(world: World, job: RLJob, storage: Path) -> dict[str, Any]:
    """Resume the checkpoint with the FSDP2 backend; return the weights after the third step."""
    checkpoint = choose_checkpoint(CheckpointStore(storage), world).path
    backend = FsdpBackend(checkpoint, job.spec.trainer, world)
    backend.load(checkpoint)
    train_step(backend, STEPS - 1)
    return whole(backend)


def split(layout: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `trainer` of a layout: sizes, and `packing` and `recompute`."""
    others = {name: layout[name] for name in ("packing", "recompute") if name in layout}
    return others | {"parallelism": {name: size for name, size in layout.items() if name not in others}}


PACKED = {"packing": "varlen", "recompute": "layer"}
INTERLEAVED = {"pipeline": 2, "virtualPipeline": 2}
DENSE = [kind for kind in supported_layouts.FAMILIES if kind != "qwen3_moe"]
thorough = pytest.mark.skipif(not THOROUGH, reason="make thorough")
LAYOUTS = [
    pytest.param(2, [PACKED | {"tensor": 2}, {}, INTERLEAVED, {"context": 2}], id="2 ranks"),
    pytest.param(
        *(4, [{"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}, PACKED | {"pipeline": 2}, INTERLEAVED]),
        id="4 ranks",
        marks=thorough,
    ),
]
OF_EXPERTS = [
    pytest.param(2, [{"expert": 2}], id="2 ranks"),
    pytest.param(
        *(2, [PACKED | {"tensor": 2}, {"expert": 2, "context": 2}, {"pipeline": 2}]), id="more", marks=thorough
    ),
    pytest.param(
        *(4, [{"tensor": 2, "expert": 2}, INTERLEAVED | {"expert": 2}, {"expert": 4, "context": 2}]),
        id="4 ranks",
        marks=thorough,
    ),
    pytest.param(
        *(4, [{"expert": 2} | PACKED, INTERLEAVED | {"expert": 2, "context": 2, "recompute": "layer"}]),
        id="copies of experts",
        marks=thorough,
    ),
]


@pytest.mark.parametrize(("ranks", "layouts"), LAYOUTS)
def test_layouts_train_like_transformers_and_resume_each_others_checkpoints(job, tmp_path, ranks, layouts):
    """Traps: norms without marks, padded vocabulary, a loss that the schedule divides, moments that are not loaded."""
    kinds = DENSE if THOROUGH else ["qwen2"]
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}
    sources = {kind: small_model(tmp_path / f"model-{kind}", kind, False, **linear) for kind in kinds}
    sources["tied"] = small_model(tmp_path / "model-tied", "qwen2", True)
    check(job, tmp_path, ranks, layouts, sources)


@pytest.mark.parametrize(("ranks", "layouts"), OF_EXPERTS)
def test_experts_train_like_those_of_transformers_and_resume_with_fsdp(job, tmp_path, ranks, layouts):
    """Traps: exchanges of different sizes, probabilities before the choice of experts, names in files."""
    sources = {"experts": small_model(tmp_path / "model", "qwen3_moe", False)}
    if THOROUGH:
        sources["tied"] = small_model(tmp_path / "model-tied", "qwen3_moe", True, norm_topk_prob=False)
    check(job, tmp_path, ranks, layouts, sources)


def check(job: Any, tmp_path: Path, ranks: int, layouts: Sequence[dict[str, Any]], sources: dict[str, Path]) -> None:
    """Train the models in the layouts, resume, and compare everything with transformers."""
    trainer = {"processesPerNode": ranks, "optimizer": OPTIMIZER}
    jobs = [job(trainer=trainer | {"backend": "megatron"} | split(layout)) for layout in layouts]
    by_rank = on_ranks(ranks, train_models, sources, jobs, tmp_path)
    for name, source in sources.items():
        expected, storage = reference(source), tmp_path / name
        for i in range(len(jobs)):
            compare(expected, [results[name][i] for results in by_rank])
        first = by_rank[0][name][0]
        for result in by_rank[0][name]:
            assert all((result["loaded"][key] == first["loaded"][key]).all() for key in first["loaded"])
            for key, weight in first["weights"].items():
                resumed = torch.tensor(result["resumed"][key])
                torch.testing.assert_close(resumed, torch.tensor(weight), rtol=0, atol=1e-5)
        assert all((first["resumed"][key] == weight).all() for key, weight in first["weights"].items()), "bit-equal"
        (by_fsdp,) = on_ranks(1, resume_by_fsdp, job(trainer={"optimizer": OPTIMIZER}), storage / "0")
        of_fsdp = in_files({key: torch.tensor(weight) for key, weight in by_fsdp.items()})
        for key, weight in expected["weights"].items():
            torch.testing.assert_close(of_fsdp[key].double(), weight, rtol=0, atol=1e-5)
        checkpoint = CheckpointStore(storage / "0").path(STEPS - 1)
        stored = [name for file in checkpoint.glob("model*.safetensors") for name in load_file(file)]
        assert sorted(stored) == sorted(expected["weights"])
