"""Registry of the built-in rewards, and of the built-in environments: the modules of a package that have a KIND."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def builtin_kinds(package: ModuleType) -> dict[str, Any]:
    """Return NAME → KIND of the modules of a package that have both, ordered by name.

    Raises:
        ValueError: two modules have the same NAME.
    """
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "KIND"):
            if module.NAME in found:
                raise ValueError(f"two modules of {package.__name__} have the NAME {module.NAME}; rename one of them")
            found[module.NAME] = module.KIND
    return dict(sorted(found.items()))
