"""Models of the trainer that are not trained: where they are, and whether they fit the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import frozen_models
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.model_cache import read_model
from rljob.trainer.backends.base import Backend, FrozenModel, LoadsFrozenModels
from rljob.trainer.errors import ModelError

TOKENIZER = "tokenizer.json"


def read_sources(environment: ComponentEnvironment) -> dict[str, Path]:
    """Return the directory of each model that is not trained, by name in `models`. The first rank of a machine
    downloads a remote one.

    Raises:
        ModelError: a model cannot be downloaded until a user changes something.
    """
    names = dict.fromkeys(frozen_models(environment.job.spec.algorithm).values())
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
    if not sources:
        return {}
    if not isinstance(backend, LoadsFrozenModels):
        raise ModelError(
            f"spec.trainer.backend: {type(backend).__name__} runs no models that are not trained: it has no method "
            "load_frozen; set fsdp, or remove klCoefficient, referenceModel and teacherModel from spec.algorithm"
        )
    loaded = {}
    for name, source in sources.items():
        check_tokens(name, source, policy)
        loaded[name] = backend.load_frozen(source)
        if loaded[name].vocabulary < backend.vocabulary:
            raise ModelError(
                f"spec.models: {name} has {loaded[name].vocabulary} token ids and the policy {backend.vocabulary}; "
                "choose a model with the tokens of the policy"
            )
    return {role: loaded[name] for role, name in frozen_models(algorithm).items()}


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
