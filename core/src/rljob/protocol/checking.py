"""How a part that is started with ``--check`` tells what would keep it from starting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from rljob.protocol.exit_codes import CONFIGURATION_ERROR


def report(find: Callable[[], Iterable[str]]) -> int:
    """Print the problems that ``find`` gives, a line each, on stderr; return the exit code.

    A ValueError or OSError that it raises is a problem too.
    """
    problems: list[str] = []
    try:
        problems.extend(find())
    except (ValueError, OSError) as error:
        problems.append(str(error))
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return CONFIGURATION_ERROR if problems else 0
