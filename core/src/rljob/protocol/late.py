"""Modules that are imported when they are used first: for libraries that import more than one uses of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Late(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def imported_late(*names: str) -> Iterator[None]:
    """Let what is imported within get these top-level modules only when it uses something of them.

    Importlib's own LazyLoader does not do: an ``import`` of what it loads has it load at once.
    """
    late = {name: _Late(name) for name in names if name not in sys.modules}
    sys.modules.update(late)
    try:
        yield
    finally:
        for name, module in late.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
