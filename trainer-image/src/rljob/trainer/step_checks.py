"""Checks of every step that end the run: updates without a finite gradient, and an engine that computes other
log-probabilities than the trainer."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from rljob.api.models import LogprobTolerance, RLJobSpec
from rljob.api.roles import Trainer
from rljob.trainer.backends.base import OptimizerUpdate
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.metrics import Mismatch

log = logging.getLogger(__name__)

BFLOAT16_TOKENS = 64
"""Tokens that a mean needs in bfloat16, where single tokens differ by more than the mean of many may."""


@dataclass
class StepChecks:
    """Checks of one process; counts over steps."""

    tolerance: LogprobTolerance
    largest: float = math.inf
    """Bound of |l_old − l_mu| of a token of the first step; infinite in bfloat16, where improbable tokens of a large
    batch differ by any amount."""
    min_tokens: int = 1
    """Tokens that the mean of a step needs."""
    settings: Trainer = field(default_factory=Trainer)
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
    """By field of the optimizer below spec.trainer."""

    @classmethod
    def of(cls, spec: RLJobSpec) -> StepChecks:
        """Return the checks of a job."""
        tolerance = spec.logprob_tolerance
        if spec.uses_bfloat16:
            return cls(tolerance, math.inf, BFLOAT16_TOKENS, spec.trainer)
        return cls(tolerance, tolerance.largest, settings=spec.trainer)

    def count_update(
        self, update: OptimizerUpdate, step: int, minibatch: int, optimizer: str = "optimizer", cause: str = ""
    ) -> None:
        """Count an update by ``spec.trainer.optimizer``, or by ``criticOptimizer``. ``cause``: of a skipped update.

        One batch with an extreme token is no reason to end a run; weights that give no finite gradient any more are.

        Raises:
            UnrecoverableError: the last `maxSkippedUpdates` updates of the optimizer were skipped.
        """
        if not update.skipped:
            self.skipped_in_a_row[optimizer] = 0
            return
        of_critic = optimizer == "criticOptimizer"
        settings = self.settings.critic_optimizer if of_critic else self.settings.optimizer
        assert settings is not None, "resolve() sets it"
        skipped = self.skipped_in_a_row[optimizer] = self.skipped_in_a_row.get(optimizer, 0) + 1
        whose = " of the critic" if of_critic else ""
        because = f", because {cause}" if cause else ""
        log.warning(
            "step %d: update %d%s was skipped: the gradient norm is %g%s", step, minibatch, whose, update.norm, because
        )
        if skipped >= settings.max_skipped_updates:
            path = f"spec.trainer.{optimizer}"
            raise UnrecoverableError(
                f"the gradient norm{whose} was not finite in {skipped} updates in a row ({path}.maxSkippedUpdates), "
                f"now {update.norm:g}{because}; lower {path}.learningRate, check the rewards, or raise "
                "maxSkippedUpdates"
            )

    def compare(self, mismatch: Mismatch, version: int, first: bool) -> None:
        """Compare engine and trainer on samples that the engine generated with the weights that the trainer holds.

        Args:
            mismatch: of tokens of the current version.
            version: of the weights.
            first: at the first step single tokens are checked too.

        Raises:
            UnrecoverableError: a difference exceeds its tolerance, or is nan at the first step.
        """
        cause = "both must use the same weights, dtype and temperature, and the same model code"
        if first and not mismatch.largest <= self.largest:
            raise UnrecoverableError(
                "at the first step the engine's log-probabilities differ from the trainer's by up to "
                f"{mismatch.largest:.2e}, more than {self.tolerance.largest_field} {self.largest:g}; {cause}"
            )
        if math.isnan(mismatch.mean):
            return  # as is the trainer's gradient: the update is skipped and counted. Engines' values are finite
        if mismatch.tokens >= self.min_tokens and not mismatch.mean <= self.tolerance.mean:
            raise UnrecoverableError(
                f"the engine's log-probabilities of {mismatch.tokens} tokens of version {version} differ from the "
                f"trainer's by {mismatch.mean:.2e} on average, more than {self.tolerance.mean_field} "
                f"{self.tolerance.mean:g}; {cause}"
            )
