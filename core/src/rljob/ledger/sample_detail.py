"""All data of one sample: its turns with tokens, its rewards, its group."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rljob.ledger.payload_record import PayloadRecord, decode_record
from rljob.ledger.reader import (
    COLUMNS,
    SAMPLES,
    LedgerReader,
    NoRunError,
    SampleRow,
    reading_values,
    sample_row,
    unknown_sample,
)
from rljob.ledger.record_store import Location, PayloadError
from rljob.ledger.sample_numbers import MEMBERS, find_number
from rljob.protocol.branches import order

POLICY = "policy"


class TokenDetail(msgspec.Struct):
    """A token written by the model."""

    id: int
    text: str | None  # None: no tokenizer; empty: the character ends in a later token
    logprob: float  # natural logarithm, at sampling
    version: int  # policy version


class CompletionInfo(msgspec.Struct):
    """Result of one request to an engine. An interrupted turn has several."""

    attempt: int
    engine: str
    finish: str  # stop | length | abort
    tokens: int


class TurnDetail(msgspec.Struct):
    """One turn: the tokens added before it (the prompt, later an observation) and the tokens written by the model."""

    turn: int
    branch: str  # see rljob.protocol.branches; empty: the first context of the trajectory
    reward: float | None  # None while the sample is not scored
    given_ids: list[int]
    given: str | None
    written: list[TokenDetail]
    completions: list[CompletionInfo]


class AnswerDetail(msgspec.Struct):
    """The answer of a frozen pool to a question of the loop."""

    branch: str  # that asked
    turn: int  # turns of the branch before it
    pool: str
    question: str  # digest
    number: int  # of equal questions of the branch, from 0
    text: str | None  # None: it cannot be read
    finish: str  # stop | length


class Sibling(msgspec.Struct):
    """Another member of the group."""

    id: str
    state: str
    reward: float | None
    advantage: float | None


class SampleDetail(msgspec.Struct):
    """A sample with its turns and its group."""

    sample: SampleRow
    attempt: int  # the first attempt that counts; above 0 if earlier attempts were discarded
    metrics: dict[str, float]  # of the reward
    siblings: list[Sibling]
    turns: list[TurnDetail]
    notes: list[str]  # messages about missing payload or tokenizer
    answers: list[AnswerDetail] = []


def show(ledger: LedgerReader, name: str) -> SampleDetail:
    """Return the details of the sample ``name``.

    Raises:
        NoRunError: the sample does not exist, or a value of it in the ledger is damaged.
    """
    with reading_values(ledger):
        return _show(ledger, name)


def _show(ledger: LedgerReader, name: str) -> SampleDetail:
    ledger.prepare_accounts()
    number = find_number(name)
    found = ledger.rows(f"SELECT {COLUMNS} FROM {SAMPLES} WHERE s.number = ?", number)
    if number is None or not found:
        raise NoRunError(unknown_sample(ledger, name))
    sample = sample_row(ledger, found[0])
    [(attempt, turn_rewards, metrics, completions)] = ledger.rows(
        "SELECT attempt, turn_rewards, metrics, completions FROM accounts WHERE number = ?", number
    )
    first = number - sample.member
    siblings = ledger.rows(
        "SELECT id, state, reward, advantage FROM samples WHERE number BETWEEN ? AND ? AND number != ? ORDER BY number",
        first,
        first + MEMBERS - 1,
        number,
    )
    notes: list[str] = []
    if metrics and sample.text is None:
        notes.append("its text cannot be read; rljob audit names the damage")
    turns = _turns(ledger, completions, attempt, notes)
    if turn_rewards:
        rewards = msgspec.json.decode(turn_rewards, type=list[float])
        for turn, reward in zip(turns, rewards, strict=False):  # not strict: the ledger may be damaged
            turn.reward = reward
    named = msgspec.json.decode(metrics, type=dict[str, float]) if metrics else {}
    others = msgspec.convert([dict(row) for row in siblings], list[Sibling])
    answers = _answers(ledger, number, attempt)
    return SampleDetail(sample, attempt, named, others, turns, notes, answers)


def _answers(ledger: LedgerReader, number: int, attempt: int) -> list[AnswerDetail]:
    """Return the answers of frozen pools, in the order in which they were recorded."""
    rows = ledger.rows(
        "SELECT branch, turn, pool, question, number, finish, segment, position, length FROM answers"
        " WHERE sample_number = ? AND attempt = ? ORDER BY segment, position",
        number,
        attempt,
    )
    answers: list[AnswerDetail] = []
    for branch, turn, pool, question, same, finish, *place in rows:
        record = ledger.text(Location(*place))
        text = None if record is None else record.text
        answers.append(AnswerDetail(branch, turn, pool, question, same, text, finish))
    return answers


def _turns(ledger: LedgerReader, completions: str | None, first_attempt: int, notes: list[str]) -> list[TurnDetail]:
    rows = ledger.rows(
        "SELECT * FROM completions WHERE number IN (SELECT value FROM json_each(?)) AND attempt >= ? ORDER BY number",
        completions or "[]",
        first_attempt,
    )
    rows.sort(key=lambda row: order((row["turn"], row["branch"])))
    vocabulary = Vocabulary(ledger) if rows else None
    turns: list[TurnDetail] = []
    for row in rows:
        if not turns or (turns[-1].turn, turns[-1].branch) != (row["turn"], row["branch"]):
            turns.append(TurnDetail(row["turn"], row["branch"], None, [], None, [], []))
        turn = turns[-1]
        turn.completions.append(CompletionInfo(row["attempt"], row["engine"], row["finish"], row["tokens"]))
        record = _record(ledger, Location(row["segment"], row["position"], row["length"]), notes)
        if record is None or vocabulary is None:
            continue
        if len(turn.completions) == 1:
            turn.given_ids = array("i", record.given).tolist()
            turn.given = vocabulary.text(turn.given_ids)
        turn.written += _tokens(record)
    for turn in turns:
        if vocabulary is not None:
            vocabulary.fill_texts(turn.written)
    if vocabulary is not None and vocabulary.missing and not notes:
        notes.append(vocabulary.missing)
    return turns


def _record(ledger: LedgerReader, location: Location, notes: list[str]) -> PayloadRecord | None:
    """Return the record of a completion. If it cannot be read, return None and add the cause to ``notes`` once."""
    try:
        return decode_record(ledger.payload.read(location))
    except PayloadError as error:
        gone = not ledger.payload.path(location.segment).exists()
        note = "its tokens were removed, as checkpoints cover them" if gone else str(error)
    except msgspec.MsgspecError as error:
        note = f"its tokens cannot be read: {error}"
    if note not in notes:
        notes.append(note)
    return None


def _tokens(record: PayloadRecord) -> list[TokenDetail]:
    ids = array("i", record.token_ids)
    versions = [span.version for span in record.spans for _ in range(span.start, span.end)]
    logprobs = array("f", record.logprobs)
    return [TokenDetail(*token) for token in zip(ids, [None] * len(ids), logprobs, versions, strict=True)]


class Vocabulary:
    """Decodes token ids with the tokenizer of the policy or of its newest checkpoint. Without a tokenizer, texts are
    None and ``missing`` holds the cause."""

    def __init__(self, ledger: LedgerReader) -> None:
        self._tokenizer: Any = None
        self.missing = ""
        places = [directory / "tokenizer.json" for directory in _models(ledger)]
        path = next((path for path in places if path.is_file()), None)
        if path is None:
            self.missing = f"tokens have no text: {' and '.join(map(str, places))} do not exist"
            return
        try:
            self._tokenizer = _tokenizer(path)
        except ValueError as error:
            self.missing = f"tokens have no text: {error}"

    def text(self, ids: list[int]) -> str | None:
        """Return the text of ``ids``, including special tokens; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)

    def fill_texts(self, tokens: list[TokenDetail]) -> None:
        """Set the texts of consecutive tokens."""
        if self._tokenizer is None:
            return
        stream = DecodeStream(skip_special_tokens=False)
        for token in tokens:
            token.text = stream.step(self._tokenizer, token.id) or ""


def _tokenizer(path: Path) -> Any:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _models(ledger: LedgerReader) -> list[Path]:
    source = next(model.source for model in ledger.job().spec.models if model.name == POLICY)
    own = ledger.storage / source.removeprefix("job://") if source.startswith("job://") else Path(source)
    newest = ledger.value("SELECT path FROM checkpoints WHERE removed = 0 ORDER BY step DESC LIMIT 1")
    return [own, *([] if newest is None else [ledger.storage / newest])]
