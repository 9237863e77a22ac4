"""Tables that omit columns on a narrow terminal. A cell is never cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table

GAP = 2
"""Terminal columns between two columns of a table."""
WIDE_GAP = 4
"""Terminal columns between two tables."""
LEFT = ("state",)
"""Columns besides the first that hold text."""


def fitting_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int = 0, dropped: Sequence[str] = ()
) -> Table:
    """Return a table without a frame.

    Args:
        headings: of the columns.
        rows: a text for each column.
        width: of the terminal in columns; 0: unlimited.
        dropped: headings of columns to omit, in this order, until the table fits.
    """
    shown = list(headings)
    for heading in dropped:
        if not width or _width(headings, rows, shown) <= width:
            break
        shown.remove(heading)
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(shown):
        if i == 0:
            table.add_column(heading, overflow="fold")  # a name longer than the terminal continues on the next line
        else:
            table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for heading, cell in zip(headings, row, strict=True) if heading in shown))
    return table


def side_by_side(headings: Sequence[str], parts: Sequence[Sequence[Sequence[str]]], width: int = 0) -> list[Table]:
    """Return tables, one below the other: in each as many parts beside each other as fit. Parts that follow each other
    and fit beside no other one are one table.

    Args:
        headings: of the columns of every part.
        parts: the rows of each part; those without rows are omitted.
        width: of the terminal in columns; 0: one table of all parts.
    """
    lines: list[list[Sequence[Sequence[str]]]] = []
    for rows in filter(None, parts):
        if lines and _beside(headings, [*lines[-1], rows]) <= width:
            lines[-1].append(rows)
        else:
            lines.append([rows])
    tables: list[Table] = []
    for alone, group in itertools.groupby(lines, lambda line: len(line) == 1):
        if alone:
            tables.append(fitting_table(headings, [row for line in group for rows in line for row in rows], width))
            continue
        for line in group:
            grid = Table.grid(padding=(0, WIDE_GAP))
            grid.add_row(*(fitting_table(headings, rows) for rows in line))
            tables.append(grid)
    return tables


def _beside(headings: Sequence[str], line: Sequence[Sequence[Sequence[str]]]) -> int:
    """Return the width of the tables of ``line`` beside each other."""
    return sum(_width(headings, rows, headings) for rows in line) + WIDE_GAP * (len(line) - 1)


def _width(headings: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[str]) -> int:
    """Return the width of the table with the columns ``shown``."""
    columns = [max(map(cell_len, cells)) for cells in zip(headings, *rows, strict=True) if cells[0] in shown]
    return sum(columns) + GAP * (len(columns) - 1)
