"""Models of the trainer beside the policy, which are not trained or a critic: where they are, and whether they fit the
policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import frozen_models
from rljob.api.roles import Trainer
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.model_cache import read_model
from rljob.trainer.algorithms.needs import needs
from rljob.trainer.backends.base import Backend, Critic, FrozenModel, LoadsFrozenModels, TrainsCritic
from rljob.trainer.errors import ModelError

TOKENIZER = "tokenizer.json"


def read_sources(environment: ComponentEnvironment) -> dict[str, Path]:
    """Return the directory of each model that is not trained, and of that which a critic starts from, by name in
    `models`. The first rank of a machine downloads a remote one.

    Raises:
        ModelError: a model cannot be downloaded until a user changes something.
    """
    algorithm = environment.job.spec.algorithm
    critic = [] if algorithm.critic_model is None else [algorithm.critic_model]
    names = dict.fromkeys([*frozen_models(algorithm).values(), *critic])
    try:
        return {name: read_model(environment, name) for name in names}
    except ValueError as error:
        raise ModelError(str(error)) from error


def load_models(
    algorithm: Algorithm, sources: Mapping[str, Path], policy: Path, backend: Backend
) -> dict[str, FrozenModel]:
    """Return the models by role; one with two roles is loaded once. All ranks take part.

    Args:
        algorithm: resolved.
        sources: of :func:`read_sources`.
        policy: directory of the policy.
        backend: of the policy.

    Raises:
        ModelError: a model cannot be loaded, or has other tokens than the policy.
    """
    names = frozen_models(algorithm)
    if not names:
        return {}
    if not isinstance(backend, LoadsFrozenModels):
        raise ModelError(
            f"spec.trainer.backend: {type(backend).__name__} runs no models that are not trained: it has no method "
            "load_frozen; set fsdp, or remove klCoefficient, referenceModel and teachers from spec.algorithm"
        )
    loaded = {}
    for name in dict.fromkeys(names.values()):
        check_tokens(name, sources[name], policy)
        loaded[name] = backend.load_frozen(sources[name])
        if loaded[name].vocabulary < backend.vocabulary:
            raise ModelError(
                f"spec.models: {name} has {loaded[name].vocabulary} token ids and the policy {backend.vocabulary}; "
                "choose a model with the tokens of the policy"
            )
    return {role: loaded[name] for role, name in names.items()}


def load_critic(
    algorithm: Algorithm,
    settings: Trainer,
    sources: Mapping[str, Path],
    policy: Path,
    backend: Backend,
    checkpoint: Path | None,
) -> Critic | None:
    """Return the critic with the state of a checkpoint; None if the algorithm has none. All ranks take part.

    Args:
        algorithm: resolved.
        settings: of the job's trainer, with an optimizer of the critic if the algorithm has one.
        sources: of :func:`read_sources`.
        policy: directory of the policy.
        backend: of the policy.
        checkpoint: to resume from; None: the run begins.

    Raises:
        ModelError: the model cannot be loaded, or has other tokens than the policy; the backend trains no critic, or
            the checkpoint has none.
    """
    name = algorithm.critic_model
    if name is None:
        if needs(algorithm).values:
            raise ModelError("spec.algorithm.criticModel: the advantage needs values; name the model of the critic")
        return None
    if not isinstance(backend, TrainsCritic):
        raise ModelError(
            f"spec.trainer.backend: {type(backend).__name__} trains no critic: it has no method load_critic; set fsdp, "
            "or an algorithm without a critic"
        )
    check_tokens(name, sources[name], policy)
    assert settings.critic_optimizer is not None, "resolve() sets it"
    critic = backend.load_critic(sources[name], settings.critic_optimizer)
    if checkpoint is not None:
        critic.load(checkpoint)
    return critic


def check_tokens(name: str, source: Path, policy: Path) -> None:
    """Compare the vocabularies of two models, as far as both have a tokenizer.json: log-probabilities are compared by
    id. Added tokens may differ.

    Raises:
        ModelError: an id means different tokens.
    """
    own, other = _tokens(policy / TOKENIZER), _tokens(source / TOKENIZER)
    wrong = next((i for i, token in own.items() if other.get(i, token) != token), None)
    if wrong is not None:
        raise ModelError(
            f"spec.models: token {wrong} of {name} is {other[wrong]!r} and that of the policy is {own[wrong]!r}; "
            "choose a model with the tokens of the policy"
        )


def _tokens(path: Path) -> dict[int, str]:
    """Return the tokens of a tokenizer's vocabulary by id; empty if they are not known."""
    try:
        vocabulary: Any = json.loads(path.read_bytes())["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score]
            return {i: entry[0] for i, entry in enumerate(vocabulary)}
        return {i: token for token, i in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
