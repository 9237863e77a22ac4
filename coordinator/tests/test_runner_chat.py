"""Chats are rendered and tokenized exactly as transformers does it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from rljob.api.tasks import Task
from rljob.runner.chat import ChatTemplate
from rljob.runner.prompts import PromptMaker
from rljob.runner.tokenizer import TextCodec

CHATML = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
BRACKETS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate!') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
LOOPS = """{%- set ns = namespace(n=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    {%- set ns.n = ns.n + 1 -%}
    {{ ns.n }}. {{ message | tojson }} {{ strftime_now('%d') }} {{ unk_token is defined }}
    {% if ns.n == 3 %}{% break %}{% endif %}
{%- endfor -%}
{{ '<end>' if add_generation_prompt }}"""
CHATS = [
    [{"role": "user", "content": " What is 1 + 1? é<b>'\" "}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello\n"},
        {"role": "user", "content": "<end> 2 + 2?", "name": "a"},
    ],
]


def write_model(directory: Path, template: object, in_config: bool) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={"<end>": 0, "<s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "bos_token": {"content": "<s>"}}
    config["bos_token"]["__type"] = "AddedToken"  # type: ignore[index]
    if in_config:
        config["chat_template"] = template  # type: ignore[assignment]
    elif template is not None:
        (directory / "chat_template.jinja").write_text(str(template))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text('{"eos_token_id": 0}')
    return directory


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "three turns"])
@pytest.mark.parametrize(
    ("template", "in_config"),
    [
        (CHATML, False),
        (BRACKETS, True),
        (LOOPS, False),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}], True),
    ],
    ids=["chatml", "brackets", "loops", "several"],
)
def test_a_chat_becomes_the_same_text_and_ids_as_in_transformers(
    tmp_path: Path, template: object, in_config: bool, chat: list[dict]
) -> None:
    from transformers import PreTrainedTokenizerFast

    model = write_model(tmp_path, template, in_config)
    theirs = PreTrainedTokenizerFast.from_pretrained(model)
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    task = Task.model_validate({"name": "a", "data": {"jsonl": {"path": "a"}}, "messagesColumn": "chat", "reward": "r"})
    prompt = PromptMaker({"a": task}, TextCodec(model), ChatTemplate(model)).make("a", {"chat": chat})
    assert prompt.text == text
    assert array("i", prompt.token_ids).tolist() == ids
    assert ids.count(1) == (1 if template is BRACKETS else 0), "the template's own token, and no second one"


def test_messages_are_filled_from_the_columns_of_the_row(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be {mood}."}, {"role": "user", "content": "{question}?"}]
    task = Task.model_validate({"name": "a", "data": {"jsonl": {"path": "a"}}, "messages": messages, "reward": "r"})
    model = write_model(tmp_path, CHATML, False)
    prompt = PromptMaker({"a": task}, TextCodec(model), ChatTemplate(model)).make(
        "a", {"mood": "kind", "question": "1"}
    )
    assert prompt.text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_chat_template_is_refused_for_chats(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no chat template .*; add it, or write the task's prompt as plain text$"):
        ChatTemplate(write_model(tmp_path, None, False))


def test_an_invalid_template_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2 of the chat template is not valid jinja: .* unknown tag 'if_'"):
        ChatTemplate(write_model(tmp_path, "\n{% if_ %}", False))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (BRACKETS, "Roles must alternate!"),
        ("{{ messages[0].content.x.y }}", "'str object' has no attribute 'x'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_the_error_of_a_chat_template_is_reported(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        ChatTemplate(write_model(tmp_path, template, False)).render([{"role": "system", "content": "a"}])
    assert str(refused.value) == f"the model's chat template refuses the messages: {reason}"
