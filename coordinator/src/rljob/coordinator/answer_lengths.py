"""Whether training prefers short answers: lengths of trained answers against those of all answers that were scored.

A selection by time (deadlines, redundant members, filters) can prefer short answers, which biases what is learned.
Answers that were cut before their end are in neither group, because their length is not known: they are counted.

The answers of a group belong to one prompt, so their lengths are related, and often the whole group is trained or not.
The test then has as many independent lengths as there are groups, or as there are answers, or a number between them
that depends on how strongly they are related: it takes the number that is least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from rljob.ledger.recorded_lengths import GroupSums
from rljob.ledger.step_metrics import Metrics

EXACT_BITS = 8


class AnswerLengths:
    """Lengths in tokens since the start of the run. Lengths from 256 on are rounded down to 8 binary digits, so that
    the memory is bounded; the means are exact."""

    def __init__(self) -> None:
        self._scored: Counter[int] = Counter()
        self._trained: Counter[int] = Counter()
        self._scored_tokens = self._trained_tokens = self._cut = 0
        self._groups = GroupSums()

    def score(self, tokens: int, before: int) -> None:
        """Add an answer of training that was scored; ``before``: scored answers of its group until then."""
        self._add_scored(tokens, 1)
        self._groups.scored += 2 * before + 1

    def train(self, tokens: int, samples: int) -> None:
        """Add answers of an applied batch. They were added to the scored ones before."""
        self._trained[_rounded(tokens)] += samples
        self._trained_tokens += tokens * samples

    def train_group(self, trained: int, scored: int) -> None:
        """Add a group of an applied batch: its answers that were trained, and all that were scored."""
        self._groups.trained += trained * trained
        self._groups.both += trained * scored

    def _add_scored(self, tokens: int, samples: int) -> None:
        self._scored[_rounded(tokens)] += samples
        self._scored_tokens += tokens * samples

    def cut(self, samples: int = 1) -> None:
        """Add answers that ended without a score although engines had begun with their group."""
        self._cut += samples

    def restore(self, lengths: Iterable[tuple[int, int, int]], groups: GroupSums, cut: int) -> None:
        """Add (tokens, scored samples, those of them that were trained), their groups, and answers that were cut."""
        self.cut(cut)
        self._groups = groups
        for tokens, scored, trained in lengths:
            self._add_scored(tokens, scored)
            self.train(tokens, trained)

    def metrics(self) -> Metrics:
        """Return the mean length of trained answers over that of all scored ones, the p-value of the hypothesis that
        trained and other answers have the same lengths (Kolmogorov–Smirnov), and the share of the answers that were cut
        and that both others do not know. Empty before the first batch; ratio 1 if no answer has tokens."""
        trained, scored = self._trained.total(), self._scored.total()
        if not trained:
            return {}
        mean = self._scored_tokens / scored
        ratio = self._trained_tokens / trained / mean if mean else 1.0
        return {
            "response_length/trained_over_scored": ratio,
            "response_length/trained_ks_p": self._p(trained, scored),
            "response_length/cut_share": self._cut / (scored + self._cut),
        }

    def _p(self, trained: int, scored: int) -> float:
        """Return the p-value of trained against untrained answers. Their largest distance is scored / (scored -
        trained) times that of trained answers from all, which is what is measured here."""
        distance, of_trained, of_scored = 0.0, 0, 0
        for length in sorted(self._scored):
            of_trained += self._trained[length]
            of_scored += self._scored[length]
            distance = max(distance, abs(of_trained / trained - of_scored / scored))
        rest = scored - trained
        if rest <= 0:
            return 1.0
        return kolmogorov_p(distance * scored / rest, self._groups.effective_size(trained, rest))


def _rounded(tokens: int) -> int:
    bits = max(0, tokens.bit_length() - EXACT_BITS)
    return tokens >> bits << bits


def kolmogorov_p(distance: float, size: float) -> float:
    """Return the asymptotic p-value of the Kolmogorov–Smirnov test, with the correction for small samples of Stephens
    (1970).

    Args:
        distance: largest difference of the two distribution functions.
        size: effective sample size: n·m / (n + m) of two independent samples.
    """
    root = math.sqrt(size)
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0
    return min(1.0, 2 * sum((-1.0) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101)))
