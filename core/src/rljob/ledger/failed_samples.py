"""The sentence that accompanies a list of failed samples: how many there are, their share, and the last reason."""

from __future__ import annotations

import dataclasses

from rljob.api.text_escape import short_line
from rljob.ledger.queries import last_failure
from rljob.ledger.reader import MOST_SAMPLES, LedgerReader, Selection, conditions
from rljob.ledger.states import OPEN, State, quoted

MAX_REASON = 200  # characters; the list has all of it


def failed_note(ledger: LedgerReader, selection: Selection, shown: int) -> str:
    """Return the sentence on the failed samples of a selection, of which ``shown`` are listed; empty if the selection
    is not of failed samples."""
    if selection.state is not State.FAILED:
        return ""
    where, values = conditions(dataclasses.replace(selection, state=None))
    failed, ended = ledger.rows(
        f"SELECT COUNT(*) FILTER (WHERE s.state = 'failed'), COUNT(*) FROM samples s JOIN groups g ON"
        f" g.number = s.group_number"
        f" WHERE {where} AND s.state NOT IN ({quoted(OPEN)})",
        *values,
    )[0]
    last = ledger.value(last_failure(where), *values)
    part = f"{shown:,} of " if shown < failed else ""
    plural = "" if failed == 1 else "s"
    note = f"{part}{failed:,} failed sample{plural} ({percent(failed, ended)} of the {ended:,} that have ended)"
    if last:
        note += f", last: {short_line(last, MAX_REASON)}"
    if shown < failed:
        note += f"; --limit {min(failed, MOST_SAMPLES)} lists {'all' if failed <= MOST_SAMPLES else 'more'}"
    return note


def percent(part: int, whole: int) -> str:
    """Return a share as text: 66 %, or <1 %."""
    share = 100 * part / max(1, whole)
    return "<1 %" if share < 1 else f"{share:.0f} %"
