from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from rljob.api.tasks import Task
from rljob.protocol.data import is_held_out
from rljob.trainer import example_model as example
from rljob.trainer import example_problems

CONFIG = {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1, "allow_negation": False}
TINY = example.Recipe(working_steps=2, bare_steps=1, batch=4, warm_up_steps=1)


def task(dataset: str = "chain_sum", config: dict[str, object] = CONFIG) -> Task:
    return Task.model_validate(
        {
            "name": "sums",
            "prompt": "Q: {question}\n",
            "data": {"reasoningGym": {"dataset": dataset, "config": config}},
            "reward": "sums",
        }
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("example") / "model"
    example.build(directory, task(), seed=3, recipe=TINY)
    return directory


def test_for_an_agent_the_chat_template_writes_the_prompts_of_the_warm_up(tmp_path: Path) -> None:
    fields = task().model_dump(by_alias=True) | {
        "prompt": None,
        "loop": "agent",
        "agent": {"function": "examples.agents.second_look:solve"},
    }
    acting = Task.model_validate(fields)
    example.build(tmp_path / "model", acting, seed=3, recipe=TINY)
    chat = [
        {"role": "user", "content": "2 + 2 ="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "?"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == f"2 + 2 =\n4{example.END}?\n"
    problem = next(example_problems.draw_problems(acting, seed=1))
    assert problem.prompt.endswith(f": {problem.expression} =\n")


@pytest.mark.parametrize(
    "expression, working",
    [
        ("8 + 7", "8+7=15;<answer>15</answer>"),
        ("2 - 3 + 7", "2-3=-1;-1+7=6;<answer>6</answer>"),
        ("1 - 9 - 9 + 2 - 0", "1-9=-8;-8-9=-17;-17+2=-15;-15-0=-15;<answer>-15</answer>"),
    ],
)
def test_worked_answers_show_steps_and_bare_answers_only_results(expression, working):
    assert example_problems.worked_answer(expression) == working
    assert example_problems.bare_answer(expression) == working[working.index("<answer>") :]


def test_problems_are_the_task_s_own_but_never_held_out_ones():
    problems = list(itertools.islice(example_problems.draw_problems(task(), seed=1), 500))
    for problem in problems:
        assert problem.prompt.startswith("Q: State") and problem.prompt.endswith(f": {problem.expression} =\n")
        assert not is_held_out(problem.prompt.removeprefix("Q: ").removesuffix("\n"))
    terms = [len(problem.expression.split()) // 2 + 1 for problem in problems]
    assert set(terms) == {2, 3, 4, 5}


def test_a_task_with_a_file_as_data_is_trained_on_default_sums():
    data = {"jsonl": {"path": "sums.jsonl"}}
    of_a_file = Task.model_validate({"name": "sums", "prompt": "{terms}?", "data": data, "reward": "sums"})
    drawn = example_problems.draw_problems(of_a_file, seed=1)
    plain = example_problems.draw_problems(task().model_copy(update={"prompt": "{question}\n"}), seed=1)
    assert list(itertools.islice(drawn, 20)) == list(itertools.islice(plain, 20))


def test_a_chat_is_refused():
    chat = task().model_copy(update={"prompt": None})
    with pytest.raises(ValueError, match="is a chat; this initializer teaches plain prompts only"):
        next(example_problems.draw_problems(chat, seed=1))


def test_another_seed_draws_other_problems():
    drawn = [set(itertools.islice(example_problems.draw_problems(task(), seed), 200)) for seed in (1, 2)]
    long = [{problem for problem in some if len(problem.expression) > 15} for some in drawn]
    assert long[0] and long[1] and not long[0] & long[1]


def test_examples_have_their_fraction_of_bare_answers_and_all_are_right():
    examples = example_problems.make_examples(
        example_problems.draw_problems(task(), seed=1), count=400, bare=0.75, seed=1
    )
    bare = [e for e in examples if e.answer.startswith("<answer>")]
    assert 270 < len(bare) < 330
    for e in examples:
        expression = e.prompt.split(": ")[2].removesuffix(" =\n")
        assert e.answer.endswith(f"<answer>{eval(expression)}</answer>")


def test_a_task_of_another_kind_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="task 'sums' is 'leg_counting'; this initializer teaches chain_sum only"):
        example.build(tmp_path / "model", task("leg_counting", {}), seed=1, recipe=TINY)


def test_the_directory_loads_with_transformers_and_with_tokenizers(directory):
    model, auto = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert sum(parameter.numel() for parameter in model.parameters()) == 370_048
    assert len(auto) <= model.config.vocab_size
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = example_problems.worked_answer("2 - 3 + 7")
    assert auto(text)["input_ids"] == plain.encode(text).ids
    assert plain.decode(plain.encode(text).ids) == text
    stop = msgspec.json.decode((directory / "generation_config.json").read_bytes())["eos_token_id"]
    assert stop == model.config.eos_token_id == auto.eos_token_id == plain.encode(text + example.END).ids[-1]
    assert plain.decode(plain.encode(text + example.END).ids) == text, "the end of an answer is no part of its text"


def test_prompts_and_worked_answers_are_short_in_tokens(directory):
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    longest = "9 - 9 - 9 - 9 - 9"
    assert len(plain.encode(f"State the final answer to the following arithmetic problem: {longest} =\n").ids) <= 32
    assert len(plain.encode(example_problems.worked_answer(longest) + example.END).ids) <= 48


def test_the_same_seed_gives_the_same_model_and_replaces_the_old_one(directory, tmp_path):
    again = tmp_path / "model"
    (again / "stale").mkdir(parents=True)
    example.build(again, task(), seed=3, recipe=TINY)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (directory / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"], "neither the draft nor the old one is left"
    assert not (again / "stale").exists()
    other = tmp_path / "other"
    example.build(other, task(), seed=4, recipe=TINY)
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def test_the_model_of_an_environment_learns_from_scripted_episodes(job, tmp_path, monkeypatch):
    made = job(
        tasks=[
            {
                "name": "lake",
                "data": {"seeds": {}},
                "loop": "environment",
                "environment": {"name": "lake", "maxTurns": 3, "observation": "{observation}>"},
                "prompt": "{observation}>",
            }
        ],
        rewards=[],
        environments=[{"name": "lake", "builtin": "frozen_lake", "config": {"separator": "", "slippery": False}}],
    )
    (tmp_path / "job.json").write_text(made.model_dump_json(by_alias=True))
    monkeypatch.setenv("RLJOB_JOB", str(tmp_path / "job.json"))
    monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
    first, second = (example.make_segments(made.spec.tasks[0], 3, TINY) for _ in range(2))
    assert first == second and len(first) == 12
    for segments in first:
        assert [answer for _, answer in segments] == [False, True] * (len(segments) // 2) and len(segments) <= 6
        assert all(text[0] in "LDRU" and text[1:] == example.END for text, answer in segments if answer)
        assert all(text.endswith(">") and "P" in text for text, answer in segments if not answer)
    example.build(tmp_path / "model", made.spec.tasks[0], seed=3, recipe=TINY)
    plain = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    text = "P__O\n>" + "L" + example.END
    assert len(plain.encode(text).ids) == 8, "every symbol is one token"


def test_a_tokenizer_that_autotokenizer_would_ruin_is_never_written(tmp_path, monkeypatch):
    def whitespace_tokenizer(texts: list[str], entries: int) -> Qwen2Tokenizer:
        tokenizer = Qwen2Tokenizer(unk_token=example.END)
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=[example.END], show_progress=False))
        tokenizer._tokenizer = backend
        return tokenizer

    monkeypatch.setattr(example, "train_tokenizer", whitespace_tokenizer)
    with pytest.raises(ValueError, match="differently from the trained one"):
        example.build(tmp_path / "model", task(), seed=3, recipe=TINY)
    assert not (tmp_path / "model").exists()


def pair(prompt: list[int], answer: list[int]) -> list[tuple[list[int], bool]]:
    return [(prompt, False), (answer, True)]


def test_every_answer_of_an_episode_has_a_loss():
    ids_BT, mask_BT = example.pad([[([5, 6], False), ([7], True), ([8], False), ([9, 0], True)], pair([5], [7])])
    assert ids_BT.tolist() == [[5, 6, 7, 8, 9, 0], [5, 7, 0, 0, 0, 0]]
    assert mask_BT.int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0]]


def test_only_answers_have_a_loss():
    ids_BT, mask_BT = example.pad([pair([5, 6], [7, 8, 0]), pair([5], [7])])
    assert ids_BT.tolist() == [[5, 6, 7, 8, 0], [5, 7, 0, 0, 0]]
    assert mask_BT.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    torch.manual_seed(0)
    model = example.make_model(end=0)
    loss = example.answer_loss(model, ids_BT, mask_BT)
    logits = [model(torch.tensor([row])).logits[0].log_softmax(-1) for row in ([5, 6, 7, 8], [5])]
    expected = [logits[0][1, 7], logits[0][2, 8], logits[0][3, 0], logits[1][0, 7]]
    assert loss.item() == pytest.approx(-sum(expected).item() / 4, abs=1e-5)


def test_the_warm_up_lowers_the_loss():
    torch.manual_seed(0)
    model = example.make_model(end=0)
    batch = example.pad([pair([5, 6], [7, 8, 0]), pair([6, 5], [8, 7, 0])])
    before = example.answer_loss(model, *batch).item()
    example.warm_up(model, iter([batch] * 20), 20, example.Recipe(warm_up_steps=5))
    assert example.answer_loss(model, *batch).item() < before / 10


def test_the_command_reads_the_job_and_refuses_unsupported_jobs(job, tmp_path, monkeypatch):
    data = {"reasoningGym": {"dataset": "leg_counting"}}
    made = job(tasks=[{"name": "legs", "data": data, "reward": "sums"}])
    (tmp_path / "job.json").write_text(made.model_dump_json(by_alias=True))
    monkeypatch.setenv("RLJOB_JOB", str(tmp_path / "job.json"))
    monkeypatch.setenv("RLJOB_STORAGE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["rljob-example-model", str(tmp_path / "model")])
    with pytest.raises(SystemExit) as exit:
        example.main()
    assert exit.value.code == 2
