"""The memory plan of the trainer: numbers by hand, derived microbatches, refusals, and defaults of devices."""

import json
from dataclasses import replace

import pytest

from core.tests.manifests import MANIFEST
from rljob.api.load import validate
from rljob.api.memory_checks import (
    UNKNOWN_TOKENS,
    describe_plan,
    engine_problems,
    microbatch_tokens,
    trainer_problems,
)
from rljob.api.memory_plan import (
    USABLE,
    AdapterSettings,
    Peak,
    TrainerSettings,
    fewest_ranks,
    layer_bytes,
    most_tokens,
    plan_memory,
    shared_host_bytes,
    step_bytes,
)
from rljob.api.model_shape import ModelShape, read_shape, shape_of
from rljob.api.resolve import resolve

QWEN = {"model_type": "qwen2", "vocab_size": 152064, "num_key_value_heads": 8, "tie_word_embeddings": False}
CONFIGS = {
    "1.5B": QWEN
    | {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4},
    "32B": QWEN | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40},
}
MODELS = {name: read_shape(config) for name, config in CONFIGS.items()}
SETTINGS = TrainerSettings(ranks=4, dtype="bfloat16", tokens=4096)
H100 = 81_559 << 20


def policy(name: str, **others: str) -> dict[str, ModelShape]:
    """Return the models of a job: the policy, and others by name."""
    return {entry: MODELS[size] for entry, size in {"policy": name, **others}.items()}


def test_parameters_and_activations_are_those_of_the_published_models():
    assert {name: model.parameters for name, model in MODELS.items()} == {
        "1.5B": 1_543_714_304,
        "7B": 7_615_616_512,
        "32B": 32_763_876_352,
    }
    # norms 2·(4 + 2·2)·3584; query, key, value and output 4·(3584 + 512), and their sums 4·28; MLP 4·2·18944
    assert layer_bytes(MODELS["7B"], "bfloat16") == 57_344 + 16_384 + 112 + 151_552
    assert layer_bytes(MODELS["1.5B"], "float32") == 2 * 12 * 1536 + 8 * (1536 + 256) + 48 + 16 * 8960


def test_the_plan_of_1_5b_on_one_gpu():
    state = 18_524_571_648  # masters and moments: 12 bytes a parameter
    whole = 6_174_857_216 + 3_087_428_608  # gradients in float32 and parameters in bfloat16
    layers = 23_733_993_472  # 103472 · 28 · 8192
    head = 127_926_272  # (10 · 1536 + 256) · 8192
    sent = 3_087_428_608  # the copy for the engines in bfloat16
    chunk = 536_030_208 + 25_165_824  # 8 · 151936 · 441 positions; gradient of the inputs 2 · 1536 · 8192
    weights = 1_400_242_176  # gradient of the output layer in both types, 6 · 151936 · 1536
    settings = replace(SETTINGS, ranks=1, tokens=8192)
    expected = state + whole + layers + head + chunk + weights
    assert step_bytes(MODELS["1.5B"], settings) == expected == 53_610_215_424
    assert plan_memory(MODELS["1.5B"], settings).step.host == sent + state


def test_the_plan_of_7b_on_four_gpus():
    plan = plan_memory(MODELS["7B"], SETTINGS)
    state = 22_846_849_536 + 7_615_616_512  # masters and moments; gradients
    units = 1_089_994_752 + 2_179_996_672 + 932_231_168  # gradient of a matrix; embedding and head; two layers
    layers, head = 25_849_757_696, 147_849_216  # 225392 · 28 · 4096; (10 · 3584 + 256) · 4096
    chunk, weights = 536_481_792 + 29_360_128, 3_269_984_256  # 8 · 152064 · 441, 2 · 3584 · 4096; 6 · 152064 · 3584
    copy = 15_231_233_024  # for the engines in bfloat16
    saved = (
        22_846_849_536 + 6_539_968_512 - 1_634_992_128
    )  # 12 bytes a parameter / 4, and 3/4 of those of the embedding
    step = state + units + layers + head + chunk + weights
    assert plan.step == Peak(step, copy + saved) == Peak(64_498_121_728, 42_983_058_944)
    assert plan.load == Peak(7_615_616_512 + 544_997_376, 544_997_376)
    # 12 bytes a parameter / 4, the embedding in bfloat16 twice and a fourth of it
    assert plan.update == Peak(22_846_849_536 + 2 * 1_089_994_752 + 272_498_688, copy + saved)
    exchanged = 2_179_989_504 + 544_997_376  # the embedding in float32 and a fourth of it
    assert plan.checkpoint == Peak(22_846_849_536 + exchanged, copy + saved) == Peak(25_571_836_416, copy + saved)
    assert plan.device == plan.step.device
    alone = plan_memory(MODELS["7B"], replace(SETTINGS, ranks=1))
    assert alone.checkpoint == Peak(91_387_398_144, copy + 91_387_398_144), "one rank copies 12 bytes a parameter"


def test_the_plan_of_32b_on_sixteen_gpus_with_recomputation():
    state = 24_572_907_264 + 8_190_969_088
    units = 1_557_135_360 + 3_114_280_960 + 1_950_420_992
    kept, head = 5_368_709_120, 421_527_552  # 64 · 2 · 5120 · 8192; (10 · 5120 + 256) · 8192
    again, working = 2_685_665_280, 1_694_498_816  # 327840 · 8192; 206848 · 8192
    gradients = 975_210_496 + 1_950_420_992  # of a layer, in both types
    settings = replace(SETTINGS, ranks=16, tokens=8192, recompute="layer")
    expected = state + units + kept + head + again + working + gradients
    assert step_bytes(MODELS["32B"], settings) == expected == 52_481_745_920


def test_the_plan_of_7b_with_adapters_on_one_gpu():
    adapters = AdapterSettings(32)
    # 32 · (2·(3584 + 3584) + 2·(3584 + 512) + 3·(3584 + 18944)) in each of 28 layers
    trained = 28 * 2_883_584
    masters = 15_231_233_024 + 4 * trained  # the model in bfloat16
    state = masters + 8 * trained
    whole = 15_231_233_024 + 2 * trained + 4 * trained  # parameters in bfloat16 and the float32 gradient
    # inputs of norms 2·4·3584, attention 4·(3584 + 512) + 4·28, MLP 4·2·18944, inputs 2·2·3584, results of A 7·2·32
    layers = (28_672 + 16_384 + 112 + 151_552 + 14_336 + 448) * 28 * 4096
    head = 147_849_216  # as above; the output layer has no gradient and needs less than a layer:
    layer = 583_008_256 + 6 * 2_883_584  # 142336 · 4096; gradients of its adapters in both types
    settings = replace(SETTINGS, ranks=1, adapters=adapters)
    plan = plan_memory(MODELS["7B"], settings)
    copy, saved = 15_231_233_024, 30_462_466_048 + 12 * trained  # a checkpoint: merged float32 weights, A, B, moments
    largest = state + whole + layers + head + layer
    assert plan.step == Peak(largest, copy + saved) == Peak(56_920_922_112, copy + saved)
    assert plan.load == Peak(masters + 2_179_989_504, 2_179_989_504)
    merged = 8 * 3584 * 18_944
    assert plan.checkpoint == Peak(state + merged, copy + saved)
    assert plan.device < H100, "full fine-tuning needs 3 GPUs"
    one = AdapterSettings(8, ("self_attn.q_proj",))
    assert one.block_parameters(MODELS["7B"]) == 8 * (3584 + 3584)
    two = plan_memory(MODELS["7B"], replace(settings, ranks=2))
    assert two.load.device == masters // 2 + 1_089_994_752
    assert two.checkpoint.device == state // 2 + 3_269_984_256 + merged + 8 * trained


def test_models_that_are_not_trained_are_planned_in_the_dtype():
    alone = plan_memory(MODELS["1.5B"], SETTINGS)
    frozen = replace(SETTINGS, frozen=(MODELS["1.5B"], MODELS["7B"]))
    both = plan_memory(MODELS["1.5B"], frozen)
    shards = 771_857_152 + 3_807_808_256  # 2 bytes a parameter / 4
    for phase in ("step", "update", "checkpoint"):
        assert both.phases[phase].device - alone.phases[phase].device == shards, phase
        assert both.phases[phase].host == alone.phases[phase].host, phase
    # rows of the largest parameter of the teacher, in float32 / 4
    assert both.load == Peak(1_543_714_304 + shards + 544_997_376, 544_997_376)
    # The forward pass of a large teacher needs more than all passes of a small policy: embedding, head and two layers.
    small, many = ModelShape(32_000, 1024, 4096, 16, 16, 4, 64), replace(SETTINGS, ranks=64, tokens=256)
    whole = 3_114_280_960 + 1_950_420_992
    taught = step_bytes(small, replace(many, frozen=(MODELS["32B"],)))
    assert step_bytes(small, many) < whole < taught - 2 * MODELS["32B"].parameters // 64 < 1.3 * whole


def test_a_critic_is_planned_like_a_second_policy_with_one_output():
    alone = plan_memory(MODELS["1.5B"], SETTINGS)
    critic = replace(MODELS["7B"], values=True)
    parameters = 7_615_616_512 - 152_064 * 3584 + 3584 + 1
    assert critic.parameters == parameters
    shard = parameters  # float32 / 4 ranks
    both = plan_memory(MODELS["1.5B"], replace(SETTINGS, critic=critic))
    assert both.load.device - alone.load.device == shard + critic.largest_parameter - MODELS["1.5B"].largest_parameter
    assert both.update.device - alone.update.device == 3 * shard, "weights and two moments"
    assert both.checkpoint.device - alone.checkpoint.device >= 3 * shard
    for phase in ("step", "update", "checkpoint"):  # the copy of a checkpoint
        assert 3 * shard <= both.phases[phase].host - alone.phases[phase].host < 3.8 * shard
    of_critic = step_bytes(critic, SETTINGS)
    assert both.step.device == of_critic + 3 * MODELS["1.5B"].parameters
    offloaded = plan_memory(MODELS["1.5B"], replace(SETTINGS, critic=critic, critic_offload=True))
    assert both.update.device - offloaded.update.device == 2 * shard
    assert offloaded.update.host - both.update.host == 4 * shard
    small = replace(MODELS["1.5B"], values=True)
    beside_small = step_bytes(MODELS["7B"], replace(SETTINGS, critic=small))
    assert beside_small == step_bytes(MODELS["7B"], SETTINGS) + 3 * small.parameters


def test_an_offloaded_optimizer_is_planned_on_the_host():
    on_device, offloaded = (
        plan_memory(MODELS["7B"], SETTINGS),
        plan_memory(MODELS["7B"], replace(SETTINGS, offload=True)),
    )
    moments, on_host = 15_231_233_024, 30_462_466_048  # 8 and 16 bytes a parameter / 4
    assert offloaded.load == on_device.load
    for phase in ("step", "update", "checkpoint"):
        before, after = on_device.phases[phase], offloaded.phases[phase]
        assert (before.device - after.device, after.host - before.host) == (moments, on_host), phase


def test_the_microbatch_is_the_largest_that_fits():
    for name, ranks, recompute in (("1.5B", 1, "none"), ("7B", 4, "none"), ("32B", 16, "layer")):
        settings, model = replace(SETTINGS, ranks=ranks, recompute=recompute), MODELS[name]
        tokens = most_tokens(model, settings, H100)
        assert 2048 < tokens < 32_768 and tokens % 256 == 0
        assert step_bytes(model, replace(settings, tokens=tokens)) <= USABLE * H100
        assert step_bytes(model, replace(settings, tokens=tokens + 256)) > USABLE * H100
    assert most_tokens(MODELS["7B"], replace(SETTINGS, recompute="layer"), H100) == 32_768
    assert most_tokens(MODELS["32B"], replace(SETTINGS, ranks=8), H100) == 0
    assert fewest_ranks(MODELS["7B"], SETTINGS, H100) == 3
    assert fewest_ranks(MODELS["32B"], SETTINGS, 24 << 30) is None
    assert fewest_ranks(MODELS["32B"], replace(SETTINGS, recompute="layer"), 24 << 30) == 63


@pytest.mark.parametrize(
    "config",
    [{"model_type": "gemma3"}, QWEN, CONFIGS["7B"] | {"hidden_size": "x"}, CONFIGS["7B"] | {"head_dim": [1]}],
)
def test_other_models_have_no_numbers(config, tmp_path):
    assert read_shape(config) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(tmp_path) is None
    assert shape_of(tmp_path / "none") is None
    (tmp_path / "config.json").write_text("[]")
    assert shape_of(tmp_path) is None


def test_heads_of_other_sizes_and_their_norms_count():
    model = read_shape(CONFIGS["1.5B"] | {"model_type": "qwen3", "head_dim": 256})
    assert model == replace(MODELS["1.5B"], head_size=256, biases=False, norms_heads=True)
    extra = (
        2 * 1536 * 1536 + 2 * 1536 * 256 + 2 * 256 - (1536 + 2 * 256)
    )  # projections twice as large, norms, no biases
    assert model.block_parameters == MODELS["1.5B"].block_parameters + extra
    assert isinstance(model, ModelShape)


@pytest.fixture
def spec():
    """Function that resolves the spec of a job with changes, on GPUs or on a CPU."""

    def make(device="nvidia", length=4096, pool=(), algorithm=(), **trainer):
        rollouts = [{"name": "main", "maxModelLength": length, **dict(pool)}]
        changes = {"trainer": trainer, "rollouts": rollouts, "algorithm": dict(algorithm)}
        if "big" in str(changes["algorithm"]):
            changes["models"] = [*MANIFEST["spec"]["models"], {"name": "big", "source": "job://big"}]
        data = MANIFEST | {"spec": MANIFEST["spec"] | changes}
        return resolve(validate(data), device).spec

    return make


def test_defaults_follow_from_the_device(spec):
    def chosen(found):
        return found.trainer.dtype, found.rollouts[0].dtype, found.trainer.microbatch_tokens

    assert chosen(spec("cpu")) == ("float32", "float32", 16_384)
    assert chosen(spec("nvidia")) == ("bfloat16", "bfloat16", None)
    assert chosen(spec("nvidia", accelerator={"kind": "cpu"})) == ("float32", "bfloat16", 16_384)
    assert chosen(spec("nvidia", dtype="float32", microbatchTokens=99)) == ("float32", "bfloat16", 99)


def test_the_trainer_derives_the_tokens_of_a_microbatch(spec):
    four = spec(processesPerNode=4)
    assert microbatch_tokens(four, policy("7B"), H100) == 5888
    assert microbatch_tokens(spec(processesPerNode=4, microbatchTokens=7), policy("7B"), H100) == 7
    assert microbatch_tokens(spec("cpu"), policy("7B"), 0) == 16_384
    assert microbatch_tokens(four, {}, H100) == microbatch_tokens(four, policy("7B"), 0) == UNKNOWN_TOKENS


def test_what_cannot_fit_is_refused_with_field_and_remedy(spec):
    def problems(found, name="7B", memory=H100):
        return [*trainer_problems(found, policy(name), memory)]

    assert problems(spec(processesPerNode=4)) == []
    assert problems(spec(lora={"rank": 32})) == []
    (adapters,) = problems(spec(lora={"targets": ["q_proj"]}, microbatchTokens=32_768))
    assert "microbatch of 32768 tokens needs" in adapters
    (states,) = problems(spec())
    assert states == (
        "spec.trainer.processesPerNode: the phase step of 7,615,616,512 parameters needs 155.5 GiB on a GPU, and the "
        "GPU has 79.6 GiB; use at least 3 processes, or set spec.trainer.recompute: layer and "
        "spec.trainer.optimizer.offload: true"
    )
    (moments,) = problems(spec(processesPerNode=3, recompute="layer"), memory=44 << 30)
    assert moments.endswith(" processes, or set spec.trainer.optimizer.offload: true")
    assert problems(spec(processesPerNode=3, recompute="layer", optimizer={"offload": True}), memory=44 << 30) == []
    (sample,) = problems(spec(processesPerNode=4, length=9000))
    assert sample == (
        "spec.rollouts[0].maxModelLength: training on a sample of 9000 tokens needs 89.1 GiB on a GPU, and each of 4 "
        "GPUs has 79.6 GiB, where 5888 tokens fit; lower it, raise spec.trainer.processesPerNode, "
        "or set spec.trainer.recompute: layer"
    )
    (microbatch,) = problems(spec(processesPerNode=4, microbatchTokens=16_384))
    assert microbatch.startswith("spec.trainer.microbatchTokens: a microbatch of 16384 tokens needs 1")
    assert "where 5888 tokens fit; lower it, or remove it" in microbatch
    (layers,) = problems(spec(processesPerNode=8), "32B")
    assert layers.endswith("; set spec.trainer.recompute: layer")
    assert problems(spec(processesPerNode=8, recompute="layer"), "32B") == []
    assert problems(spec(backend="acme.trainer:Backend")) == []
    assert [*engine_problems(spec(), policy("32B"), H100)] == []
    (weights,) = engine_problems(spec(pool={"dtype": "float32"}), policy("32B"), H100)
    assert weights == (
        "spec.rollouts[0].dtype: the float32 weights of 32,763,876,352 parameters need 122.1 GiB on a GPU of 79.6 GiB; "
        "set bfloat16"
    )
    (cache,) = engine_problems(spec(pool={"kvCacheBytes": 64 << 30}), policy("7B"), 48 << 30)
    assert cache.startswith(
        "spec.rollouts[0].kvCacheBytes: 64.0 GiB and 14.2 GiB of weights do not fit a GPU of 48.0 GiB"
    )
    assert [*engine_problems(spec("cpu"), policy("32B"), 1)] == []
    halves = {"dtype": "float32", "parallelism": {"tensor": 2, "data": 3}}
    assert [*engine_problems(spec(pool=halves), policy("32B"), H100)] == []
    halves["kvCacheBytes"] = 32 << 30
    (cache,) = engine_problems(spec(pool=halves), policy("32B"), H100)
    assert "32.0 GiB and 61.0 GiB of weights do not fit a GPU of 79.6 GiB" in cache


def test_more_gpus_and_fields_are_tried_together(spec):
    def remedy(processes, name, memory, host=0, **trainer):
        found = spec(processesPerNode=processes, **trainer)
        (problem,) = trainer_problems(found, policy(name), memory, host)
        assert problem.startswith("spec.trainer.processesPerNode: ")
        return problem.rpartition("; ")[2]

    assert remedy(2, "32B", H100) == "set spec.trainer.recompute: layer and use at least 9 processes"
    assert [*trainer_problems(spec(processesPerNode=9, recompute="layer"), policy("32B"), H100)] == []
    assert remedy(8, "32B", 24 << 30) == "set spec.trainer.recompute: layer and use at least 63 processes"
    assert [*trainer_problems(spec(processesPerNode=63, recompute="layer"), policy("32B"), 24 << 30)] == []
    assert remedy(1, "1.5B", 16 << 30) == (
        "use at least 54 processes, or set spec.trainer.recompute: layer and use at least 3 processes"
    )
    more = {"recompute": "layer", "parallelism": {"replicate": 2}}
    assert remedy(4, "32B", H100, **more).startswith("use at least 18 processes, or fewer copies (spec.trainer.")
    # The gradient of the largest tensor and the whole tensors of a layer do not become smaller with more GPUs.
    assert remedy(8, "32B", 12 << 30) == "choose a smaller model"


def test_an_offload_that_the_host_has_no_memory_for_is_not_recommended(spec):
    (problem,) = trainer_problems(spec(), policy("7B"), H100, 256 << 30)
    assert problem.endswith(
        "3 processes, or set spec.trainer.recompute: layer and spec.trainer.optimizer.offload: true"
    )
    (problem,) = trainer_problems(spec(), policy("7B"), H100, 128 << 30)
    assert problem.endswith(
        "; use at least 3 processes, or set spec.trainer.recompute: layer and use at least 2 processes"
    )


def test_the_ranks_of_a_machine_share_the_copies_on_its_host():
    model, parameters = MODELS["7B"], MODELS["7B"].parameters
    assert shared_host_bytes(model, SETTINGS) == 14 * parameters, "2 for the engines, 12 for a checkpoint"
    offloaded = replace(SETTINGS, offload=True)
    assert shared_host_bytes(model, offloaded) == 30 * parameters
    assert shared_host_bytes(model, replace(offloaded, ranks=1)) == plan_memory(model, replace(offloaded, ranks=1)).host
    assert shared_host_bytes(model, replace(offloaded, copies=3)) == (30 + 2 * 16) * parameters
    assert shared_host_bytes(model, replace(SETTINGS, copies=3)) == 14 * parameters, "one copy writes the checkpoint"


def template(value):
    return {"spec": {"containers": [{"name": "main", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": value}]}]}}


def test_a_gpu_that_an_engine_shares_gives_no_microbatch(spec):
    def shared(mine, theirs, **trainer):
        return spec(pool={"template": template(theirs)}, template=template(mine), **trainer)

    for mine, theirs in (("0", "0"), ("0,1", "1"), ("GPU-11", "GPU-11aa")):
        found = shared(mine, theirs)
        assert microbatch_tokens(found, policy("1.5B"), H100) == UNKNOWN_TOKENS
        assert describe_plan(found, policy("1.5B"), H100)[0].endswith(
            "microbatches of 4096 tokens and samples of up to 4096 (trainer and engine share the memory of a GPU that "
            "their templates name)"
        )
    for mine, theirs in (("0", "1"), ("1", "11"), ("GPU-11aa", "GPU-11bb")):
        assert microbatch_tokens(shared(mine, theirs), policy("1.5B"), H100) > UNKNOWN_TOKENS
    assert microbatch_tokens(shared("0", "0", microbatchTokens=99), policy("1.5B"), H100) == 99
    # The trainer alone must fit, with the default of a shared GPU.
    (problem,) = trainer_problems(shared("0", "0"), policy("7B"), H100)
    assert problem.startswith(
        "spec.trainer.processesPerNode: the phase step of 7,615,616,512 parameters needs 155.5 GiB"
    )
    short = spec(length=512, pool={"template": template("0")}, template=template("0"))
    (problem,) = trainer_problems(short, policy("1.5B"), 38 << 30)
    assert problem.startswith("spec.trainer.microbatchTokens: a microbatch of 4096 tokens needs 38.8 GiB on a GPU, and")
    assert "; set at most " in problem
    given = spec(length=512, pool={"template": template("0")}, template=template("0"), microbatchTokens=8192)
    (problem,) = trainer_problems(given, policy("1.5B"), 38 << 30)
    assert "fit; lower it, or set spec.trainer.recompute" in problem
    assert [*trainer_problems(shared("0", "0"), policy("1.5B"), H100)] == []


def test_the_tokens_of_a_microbatch_leave_room_for_a_teacher(spec):
    taught = spec(processesPerNode=4, algorithm={"teachers": [{"model": "big"}]})
    assert microbatch_tokens(taught, policy("1.5B", big="7B"), H100) < microbatch_tokens(
        spec(processesPerNode=4), policy("1.5B"), H100
    )
    assert microbatch_tokens(taught, policy("1.5B"), H100) == UNKNOWN_TOKENS
    (problem,) = trainer_problems(taught, policy("1.5B", big="32B"), 16 << 30)
    assert "of 1,543,714,304 parameters and 32,763,876,352 that are not trained needs" in problem
    assert (
        "1,543,714,304 parameters and 7,615,616,512 that are not trained, 4 ranks"
        in describe_plan(taught, policy("1.5B", big="7B"), H100)[0]
    )
    own = spec(processesPerNode=4, algorithm={"klCoefficient": 0.1})
    assert "and 1,543,714,304 that are not trained" in describe_plan(own, policy("1.5B"), H100)[0]


def test_the_tokens_of_a_microbatch_leave_room_for_a_critic(spec):
    ppo = spec(processesPerNode=4, algorithm={"preset": "ppo"})
    assert microbatch_tokens(ppo, policy("1.5B"), H100) < microbatch_tokens(
        spec(processesPerNode=4), policy("1.5B"), H100
    )
    other = spec(processesPerNode=4, algorithm={"preset": "ppo", "criticModel": "big"})
    assert microbatch_tokens(other, policy("1.5B"), H100) == UNKNOWN_TOKENS
    (problem,) = trainer_problems(other, policy("1.5B", big="32B"), 80 << 30)
    assert "of 1,543,714,304 parameters, 31,985,313,793 of a critic needs" in problem


def test_explain_shows_the_plan(spec):
    assert describe_plan(spec(processesPerNode=4), policy("7B"), H100) == [
        "memory of the trainer's first process: 7,615,616,512 parameters, 4 ranks, bfloat16, microbatches of 5888 "
        "tokens and samples of up to 4096; 90% of 79.6 GiB can be used",
        "  load: GPU 10.1 GiB, host 520 MiB",
        "  step: GPU 70.7 GiB, host 40.0 GiB",
        "  update: GPU 23.6 GiB, host 40.0 GiB",
        "  checkpoint: GPU 23.8 GiB, host 40.0 GiB",
    ]
    on_cpu = describe_plan(spec("cpu", microbatchTokens=64, length=512), policy("1.5B"), 0)
    assert on_cpu[0].endswith("1 rank, float32, microbatches of 64 tokens and samples of up to 512")
    assert all("GPU" not in line for line in on_cpu)
