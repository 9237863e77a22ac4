"""Prints the samples of a run as they were sent to their rewards: one JSON object a line, for `rljob reward check`.

python -m rljob.runner.recorded_samples LIMIT   of the job and storage that the environment names

Each line is a RecordedSample. The newest samples come first. A
sample whose tokens are deleted has the recorded text of its last answer.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from rljob.api.resolve import resolve
from rljob.api.tasks import Task
from rljob.ledger.reader import LedgerReader, NoRunError, SampleRow, Selection, samples
from rljob.ledger.sample_detail import SampleDetail, show
from rljob.protocol.branches import path
from rljob.protocol.environment import ComponentEnvironment, read_environment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.score_messages import RecordedSample, ScoreItem, ScoreTurn
from rljob.runner.cut_answer import answer_text
from rljob.runner.main import find_readers
from rljob.runner.reward_routing import weighted_metric
from rljob.runner.setup import Prepared, prepare


def recorded_samples(environment: ComponentEnvironment, limit: int) -> Iterator[RecordedSample]:
    """Yield the newest samples of a run that have an answer.

    Raises:
        ValueError: the manifest or the data is invalid.
        NoRunError: there is no run in the storage.
    """
    prepared, spec = prepare(environment, find_readers(environment.job)), environment.job.spec
    names = [reward.name for reward in spec.rewards]
    with LedgerReader(environment.storage) as ledger:
        for row in samples(ledger, Selection(limit=limit)):
            if row.text is not None:
                detail = show(ledger, row.id)
                item = _item(prepared, ledger, row, detail)
                yield RecordedSample(item, recorded_rewards(spec.tasks, names, item, detail))


def recorded_rewards(
    tasks: Sequence[Task], names: Sequence[str], item: ScoreItem, detail: SampleDetail
) -> dict[str, float]:
    """Return what each reward gave a sample, as far as the run recorded it.

    Args:
        tasks: of the job.
        names: of the rewards of the job.
        item: the sample.
        detail: what the ledger has of it.
    """
    if detail.sample.reward is None:
        return {}
    task = next(task for task in tasks if task.name == item.task)
    if not task.more_rewards:
        name = task.reward_of(item.problem, names)
        return {} if name is None else {name: detail.sample.reward}
    metrics = {name: detail.metrics.get(weighted_metric(name)) for name in names}
    return {name: value for name, value in metrics.items() if value is not None}


def _item(prepared: Prepared, ledger: LedgerReader, row: SampleRow, detail: SampleDetail) -> ScoreItem:
    split = "train" if row.kind == "train" else "heldOut"
    task = next(task for task in resolve(prepared.environment.job).spec.tasks if task.name == row.task)
    problem = prepared.sources[row.task].problem(split, row.row)
    found = {(turn.turn, turn.branch): turn for turn in detail.turns}
    branch = ledger.scored_branch(row.id)
    scored = [key for key in found if key[1] == branch]
    details = [found[key] for key in path(max(scored))] if scored else detail.turns  # without branches: all turns
    turns: list[ScoreTurn] = []
    for number, turn in enumerate(details):
        if number and turn.given_ids:
            turns.append(ScoreTurn("observation", prepared.codec.decode(array("i", turn.given_ids).tobytes())))
        written = array("i", [token.id for token in turn.written]).tobytes()
        finish = turn.completions[-1].finish
        turns.append(ScoreTurn("model", answer_text(prepared.codec, task.sampling, written, finish)))
    last = len(details[-1].written) if details else 0
    rewards = prepared.environment.job.spec.rewards
    with_ids = last and any(reward.token_ids for reward in rewards if reward.name == prepared.environment.name)
    prompt = prepared.maker.make(row.task, problem).text
    if (task.environment or task.agent) and detail.turns:  # the text of its first context is recorded as tokens only
        prompt = prepared.codec.decode(array("i", detail.turns[0].given_ids).tobytes())
    return ScoreItem(
        sample=row.id,
        task=row.task,
        prompt=prompt,
        completion=turns[-1].text if last else row.text or "",
        finish=details[-1].completions[-1].finish if details else row.finish or "",
        problem=problem,
        turns=turns if len(details) > 1 else [],
        response_tokens=last or row.response_tokens,
        metadata={
            "split": split,
            "row": row.row,
            "attempt": detail.attempt,
            "maxTokens": task.sampling.max_tokens,
        },
        response_token_ids=[token.id for token in details[-1].written] if with_ids else None,
    )


def main() -> int:
    """Print the samples; return the exit code."""
    encoder = msgspec.json.Encoder()
    try:
        for sample in recorded_samples(read_environment(), int(sys.argv[1])):
            sys.stdout.buffer.write(encoder.encode(sample) + b"\n")
    except (ValueError, NoRunError) as error:
        sys.stderr.write(f"{error}\n")
        return CONFIGURATION_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
