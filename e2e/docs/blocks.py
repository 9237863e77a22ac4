"""Parses pages of the documentation: fenced blocks, links, code spans and anchors.

The words after the language of a block select its test:

    console               the commands ($ …) are run in a shell, in order; the following lines are the expected output,
                          in which … matches any text; the exit code is 0, or N with `exit=N` for the last command
    console cluster       the commands need a cluster: e2e/integration/test_pages.py runs them
    console pods          the commands need a cluster with running pods: e2e/pods/test_pages.py runs them
    console not-run: why  the block is not run, for the given reason
    yaml, json, python, sh, csv   with `file=NAME`: written to that file for the following blocks
    yaml                  a manifest, or fields of a spec; must be valid
    python                the program is run
    text                  not tested
    mermaid               a diagram, not tested
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(.*)$")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line``: line of its fence; ``info``: the words after the language."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str | None:
        """Name of the file to which the block is written, or None."""
        found = re.search(r"\bfile=(\S+)", self.info)
        return found[1] if found else None

    @property
    def exit_code(self) -> int:
        """Expected exit code of the last command."""
        found = re.search(r"\bexit=(\d+)", self.info)
        return int(found[1]) if found else 0

    @property
    def reason(self) -> str | None:
        """The reason for which the block is not run, or None."""
        found = re.search(r"\bnot-run: *(.+)$", self.info)
        return found[1] if found else None

    @property
    def cluster(self) -> bool:
        """Whether its commands need a cluster."""
        return re.search(r"\bcluster\b", self.info.partition("not-run")[0]) is not None

    @property
    def pods(self) -> bool:
        """Whether its commands need a cluster with running pods."""
        return self.info.split(" ")[0] == "pods"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console block and their expected output."""
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), ""))
            elif line.startswith("> ") and found and not found[-1][1]:
                found[-1] = (f"{found[-1][0]}\n{line.removeprefix('> ')}", "")
            else:
                assert found, f"{self}: begins with output; write $ before commands"
                found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        return found


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page in order."""
    found, start, info, lines = [], 0, "", []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if fence and not start:
            start, info, lines = number, fence[1].strip(), []
        elif fence:
            language, _, rest = info.partition(" ")
            found.append(Block(page, start, language, rest, "".join(f"{text}\n" for text in lines)))
            start = 0
        else:
            lines.append(line)
    assert not start, f"{page.name}:{start}: the block does not end"
    return found


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links."""
    return LINK.findall(prose(page))


def code_spans(page: Path) -> list[str]:
    """Return the code spans (`…`) outside of blocks."""
    return CODE.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    titles = HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
