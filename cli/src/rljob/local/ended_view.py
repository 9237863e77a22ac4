"""Lines on samples that ended without being trained, and on failed problems of evaluations: counts, shares, reasons.

They show why a run is slow, or why an accuracy is low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob.api.job_status import EndedSamples, EvaluationResult
from rljob.api.text_escape import short_line
from rljob.ledger.failed_samples import MAX_REASON, percent

LARGE_SHARE = 0.1
"""A smaller share of filtered, surplus or expired samples is normal and not shown."""
CAUSES = {
    "filtered": "groupFilter rejected their groups",
    "surplus": "no batch needed them",
    "expired": "their groups were not complete at the deadline",
}


def ended_rows(ended: EndedSamples) -> Iterator[tuple[str, str]]:
    """Yield (end, text) for failed samples, and for each other end with a large share."""
    if ended.failed:
        last = f", last: {short_line(ended.last_failure, MAX_REASON)}" if ended.last_failure else ""
        yield "failed", f"{_count(ended.failed, ended)}{last}"
    for end, cause in CAUSES.items():
        if (number := getattr(ended, end)) >= LARGE_SHARE * max(1, _total(ended)):
            yield end, f"{_count(number, ended)}, {cause}"


def ended_shares(ended: EndedSamples) -> str:
    """Return the ends of :func:`ended_rows` with their shares on one line: failed 66 %, filtered 20 %."""
    return ", ".join(f"{end} {percent(getattr(ended, end), _total(ended))}" for end, _ in ended_rows(ended))


def ended_summary(ended: EndedSamples, directory: Path) -> Iterator[str]:
    """Yield the lines of the summary of a run."""
    for end, text in ended_rows(ended):
        yield f"{end} in training: {text}"
    if ended.failed:
        yield f"list of failed samples: rljob samples {directory} --state failed"


def failed_problems(result: EvaluationResult) -> str:
    """Return how many problems of an evaluation failed and why; empty if none failed."""
    if not result.failed:
        return ""
    reason = f": {short_line(result.failure, MAX_REASON)}" if result.failure else ""
    counted = "problems" if result.samples_per_problem == 1 else "answers"
    return f"{result.failed:,} of {result.samples:,} {counted} failed and count as 0{reason}"


def failed_summary(results: Sequence[EvaluationResult]) -> Iterator[str]:
    """Yield a line for the first and for the last evaluation of a task if problems failed in it."""
    for result in {results[0].version: results[0], results[-1].version: results[-1]}.values():
        if result.failed:
            yield f"evaluation of {result.task} at version {result.version}: {failed_problems(result)}"


def _total(ended: EndedSamples) -> int:
    return ended.trained + ended.baseline + ended.filtered + ended.surplus + ended.expired + ended.failed


def _count(number: int, ended: EndedSamples) -> str:
    return f"{number:,} sample{'' if number == 1 else 's'} ({percent(number, _total(ended))})"
