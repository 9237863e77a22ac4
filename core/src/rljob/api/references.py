"""What fields of a manifest demand of each other. Called by RLJobSpec's validator once every field alone is valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from rljob.api.engine_args import refused

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec


def problems(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each contradiction; the field's path is relative to spec."""
    yield from _names(spec)
    yield from _models(spec)
    yield from _tasks(spec)
    yield from _rollouts(spec)
    yield from _batches(spec)


def _names(spec: RLJobSpec) -> Iterator[str]:
    for field in ("models", "tasks", "rewards", "rollouts"):
        seen: set[str] = set()
        for i, entry in enumerate(getattr(spec, field)):
            if entry.name in seen:
                yield f"{field}[{i}].name: {entry.name!r} is used twice; give every entry its own name"
            seen.add(entry.name)


def _models(spec: RLJobSpec) -> Iterator[str]:
    if "policy" not in {model.name for model in spec.models}:
        yield "models: none is called 'policy'; name the model to train 'policy'"
    sources = [(f"models[{i}].source", model.source) for i, model in enumerate(spec.models)]
    command = spec.initializer.command if spec.initializer else []
    sources += [(f"initializer.command[{i}]", text) for i, text in enumerate(command)]
    for field, text in sources:
        if text.startswith("job://"):
            path = PurePosixPath(text.removeprefix("job://"))
            if path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
                yield f"{field}: {text!r} is no path inside the storage; write job://PATH without .. and a leading /"


def _tasks(spec: RLJobSpec) -> Iterator[str]:
    rewards = [reward.name for reward in spec.rewards]
    for i, task in enumerate(spec.tasks):
        if task.reward not in rewards:
            yield (
                f"tasks[{i}].reward: there is no reward called {task.reward!r} (but {', '.join(rewards)}); "
                "add it to rewards"
            )
        if "{question}" not in task.prompt:
            yield f"tasks[{i}].prompt: the template lacks {{question}}; put it where the problem goes"
        config = f"tasks[{i}].data.reasoningGym.config"
        if "seed" in task.data.reasoning_gym.config:
            yield f"{config}.seed: governed by the job; remove it and set spec.seed"
        if "size" in task.data.reasoning_gym.config:
            yield f"{config}.size: governed by the job; remove it"
    tasks = [task.name for task in spec.tasks]
    for i, name in enumerate((spec.evaluation.tasks or []) if spec.evaluation else []):
        if name not in tasks:
            yield f"evaluation.tasks[{i}]: there is no task called {name!r} (but {', '.join(tasks)}); name one of tasks"


def _rollouts(spec: RLJobSpec) -> Iterator[str]:
    models = [model.name for model in spec.models]
    for i, rollout in enumerate(spec.rollouts):
        if rollout.model not in [*models, "policy"]:
            yield f"rollouts[{i}].model: there is no model called {rollout.model!r}; add it to models"
        elif rollout.model != "policy":
            yield f"rollouts[{i}].model: only 'policy' is supported yet; frozen pools come later"
        for refusal in refused(rollout.engine, rollout.args):
            yield f"rollouts[{i}].{refusal}"
        for j, task in enumerate(spec.tasks):
            if task.sampling.max_tokens >= rollout.max_model_length:
                yield (
                    f"tasks[{j}].sampling.maxTokens: {task.sampling.max_tokens} leaves no room for a prompt in "
                    f"rollouts[{i}].maxModelLength {rollout.max_model_length}; lower it or raise the other"
                )


def _batches(spec: RLJobSpec) -> Iterator[str]:
    samples = spec.training.prompts_per_step * spec.training.samples_per_prompt
    minibatches = spec.algorithm.minibatches or 1
    if minibatches > samples:
        yield f"algorithm.minibatches: {minibatches} is more than the {samples} samples of a batch; lower it"
    if spec.training.samples_per_prompt == 1 and spec.algorithm.group_filter == "nonconstant":
        yield (
            "algorithm.groupFilter: with training.samplesPerPrompt 1 every group is constant and would be rejected; "
            "use none, or more samples"
        )
