"""CEL rules of tasks, of their rewards, and of the locations of models and files."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.cel_rule import CelRule, at_most_one_of, given
from rljob.api.model_address import HUB_FORM, HUB_PATTERN, S3_FORM, S3_PATTERN
from rljob.api.rewards import REWARDS
from rljob.api.tasks import SOURCES

_BRACES = r"\{\{|\}\}"


def builtin_reward_rules() -> Iterator[CelRule]:
    """Yield one rule for all built-in rewards that score the same data."""
    by_data: dict[frozenset[str], list[str]] = {}
    for name, kind in REWARDS.items():
        if kind.data is not None:
            by_data.setdefault(frozenset(kind.data), []).append(name)
    for data, names in by_data.items():
        fits = " || ".join(f"has(task.data.{source})" for source in SOURCES if source in data)
        named = " || ".join(f"reward.builtin == '{name}'" for name in names)
        yield CelRule(
            "spec",
            f"self.tasks.all(task, {fits} || !self.rewards.exists(reward, "
            f"has(task.reward) && reward.name == task.reward && has(reward.builtin) && ({named})))",
            f"a task's reward is the builtin {' or '.join(names)}, which scores {REWARDS[names[0]].accepted} data "
            "only; use another reward",
            ".tasks",
        )


def task_rules() -> Iterator[CelRule]:
    """Yield the rules of one task."""
    yield CelRule(
        "spec.tasks[]",
        "has(self.reward) || has(self.environment) || has(self.agent)",
        "required for a task without an environment or an agent; name one of rewards",
        ".reward",
    )
    yield CelRule(
        "spec.tasks[]",
        "self.loop != 'environment' || has(self.environment)",
        "the loop environment needs one; name one of environments, or set another loop",
        ".environment",
    )
    yield from _agent_rules()
    yield CelRule(
        "spec.tasks[].sampling",
        "self.minTokens < self.maxTokens",
        "is not less than maxTokens; lower it or raise the other",
        ".minTokens",
    )
    yield CelRule(
        "spec.tasks[].sampling",
        "!self.includeStop || self.stop.size() > 0",
        "there is no stop string; add stop, or remove it",
        ".includeStop",
    )
    yield CelRule(
        "spec.tasks[].data",
        f"{given(SOURCES)}.exists_one(given, given)",
        f"give exactly one of {', '.join(SOURCES)}",
    )
    yield CelRule(
        "spec.tasks[].data",
        "!has(self.reasoningGym) || self.columns.size() == 0",
        "problems of reasoningGym always have question, answer and metadata; remove it",
        ".columns",
    )
    for source, other in (("jsonl", "heldOutPath"), ("parquet", "heldOutPath"), ("datasets", "heldOutSplit")):
        yield CelRule(
            f"spec.tasks[].data.{source}",
            f"!has(self.{other}) || !has(self.heldOutFraction) || self.heldOutFraction == 0.0",
            f"{other} is given too; give one of them",
            ".heldOutFraction",
        )
    yield CelRule(
        "spec.tasks[]",
        at_most_one_of("prompt", "messages", "messagesColumn"),
        "a task has one of prompt, messages, messagesColumn",
    )
    yield CelRule(
        "spec.tasks[].messages",
        "self[self.size() - 1].role != 'assistant'",
        "the last message is the assistant's; end with the message that the model answers",
    )
    yield CelRule(
        "spec.tasks[].prompt",
        rf"self.matches(r'^([^{{}}]|{_BRACES}|\{{[^{{}}!:.\[\]]+:?\}})*$')",
        "is not a template: {column} stands for the value of a column; write {{ and }} for literal braces",
    )
    yield CelRule(
        "spec.tasks[].prompt",
        rf"self.matches(r'^([^{{}}]|{_BRACES})*(\{{[^{{]|[{{}}]$)')",
        "the template names no column; put {question} where the problem goes",
    )


def _agent_rules() -> Iterator[CelRule]:
    """Yield the rules of a task's agent program."""
    yield CelRule(
        "spec.tasks[]",
        "self.loop != 'agent' || has(self.agent)",
        "the loop agent needs one; name its program, or set another loop",
        ".agent",
    )
    yield CelRule(
        "spec.tasks[].agent",
        f"{given(('function', 'command'))}.exists_one(given, given)",
        "give exactly one of function, command",
    )
    yield CelRule(
        "spec.tasks[]",
        "!has(self.agent) || !has(self.agent.command) || has(self.reward) || has(self.rewardColumn) "
        "|| self.moreRewards.size() > 0",
        "required for an agent with a command, which returns no reward; name one of rewards",
        ".reward",
    )
    yield CelRule(
        "spec.tasks[]",
        "!has(self.agent) || !(self.loop in ['single_turn', 'environment'])",
        "starts no agent; set loop: agent",
        ".loop",
    )
    yield CelRule(
        "spec.tasks[]",
        "!has(self.agent) || !has(self.environment)",
        "a task has an environment or an agent; remove one of them",
        ".environment",
    )
    yield CelRule(
        "spec.tasks[]",
        "!has(self.agent) || !has(self.prompt) && !has(self.messages) && !has(self.messagesColumn)",
        "the agent writes the messages itself; remove prompt, messages and messagesColumn",
        ".agent",
    )


def location_rules() -> Iterator[CelRule]:
    """Yield rules for locations of models and files. In a cluster these locations must be in the job's storage."""
    yield CelRule(
        "spec.models[].source",
        f"!self.startsWith('hf://') || self.matches(r'{HUB_PATTERN}')",
        f"is not the address of a model; write {HUB_FORM}",
    )
    yield CelRule(
        "spec.models[].source",
        f"!self.startsWith('s3://') || self.matches(r'{S3_PATTERN}')",
        f"is not the address of a model; write {S3_FORM}",
    )
    for at in (
        "spec.models[].source",
        *(f"spec.tasks[].data.{table}.{field}" for table in ("jsonl", "parquet") for field in ("path", "heldOutPath")),
        "spec.tasks[].data.datasets.path",
    ):
        remote = " || self.startsWith('hf://') || self.startsWith('s3://')" if at == "spec.models[].source" else ""
        yield CelRule(
            at,
            f"self.startsWith('job://') || !self.contains('://'){remote}",
            "cannot be read; write job://PATH for a path in the storage",
        )
        yield CelRule(
            at,
            "self.contains('://')",
            "a path of one machine is for rljob run; in a cluster put it into the job's storage and write job://PATH",
        )
        yield _inside(at)
    yield _inside("spec.initializer.command[]")


def _inside(at: str) -> CelRule:
    outside = r"(?s)^job://(/|(\.?/)*\.?$|(.*/)?\.\.(/|$))"
    return CelRule(
        at,
        f"!self.matches(r'{outside}')",
        "is not a path inside the storage; write job://PATH without .. and a leading /",
    )
