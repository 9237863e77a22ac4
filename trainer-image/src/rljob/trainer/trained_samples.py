"""Which samples of a batch are trained: those whose tokens can have a gradient.

A sample whose advantage is 0 adds nothing to the gradient of an objective that is a multiple of the advantage. If
nothing else needs the sample, it is neither fetched nor computed. The weights in the loss come from the scalars of all
samples of a minibatch, so the gradient is the same. A minibatch without trained samples is still an update, with a
gradient of 0: AdamW decays its moments as if the samples had been computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.base import ScalarEstimator
from rljob.trainer.algorithms.needs import failure, load_function, needs
from rljob.trainer.algorithms.objectives.base import is_zero_without_advantage
from rljob.trainer.algorithms.sample_weights import sample_weights
from rljob.trainer.algorithms.stabilizers import masked_groups, shape_rewards
from rljob.trainer.process_group import World


def trained_samples(train: Train, algorithm: Algorithm, world: World) -> NDArray[np.bool_]:
    """Return whether each sample of the batch is trained (N,), the same on all ranks; all ranks take part.

    All samples are trained if the advantage depends on more than scalars of the batch, if it is whitened, if a field or
    a function of the algorithm needs all samples, and in a batch whose log-probabilities must equal the engine's.

    Raises:
        UnrecoverableError: the advantage fails.
    """
    estimator = load_function(algorithm, "advantage")
    skip = isinstance(estimator, ScalarEstimator) and is_zero_without_advantage(load_function(algorithm, "objective"))
    everywhere = algorithm.whiten_advantages or algorithm.positive_coefficient or needs(algorithm).all_samples
    if not skip or everywhere or train.check_initial_logprobs:
        return np.ones(len(train.samples), np.bool_)
    trained_N, problem = b"", None
    if world.rank == 0:  # a user's function need not return the same bits on every machine
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                samples = shape_rewards(train, algorithm).samples
                zero_N = estimator.of_samples(samples).astype(np.float32) == 0
                unused_N = masked_groups(samples, algorithm) | (sample_weights(samples, algorithm) == 0)
                trained_N = (~(zero_N | unused_N)).tobytes()
        except Exception as error:  # noqa: BLE001 a user's estimator may raise anything: the run ends
            problem = failure(algorithm, "advantage", error)
    world.raise_first_error(problem)
    return np.frombuffer(world.broadcast(trained_N if world.rank == 0 else None), np.bool_)
