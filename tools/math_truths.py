"""Compares the verdicts of the reward `math` with the truths that math-verify publishes in its source archive.

The archive is fetched from the package registry and not stored in the repository. The cases of a test have the
extraction (LaTeX, numbers, or both) that the test has.

python -m tools.math_truths   prints one JSON object: cases, and those with another verdict
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig

from rljob.rewards.math_verdicts import Parsed, accepted, read

TARGETS = {"latex": LatexExtractionConfig(boxed_match_priority=0), "expr": ExprExtractionConfig()}


REFUSED = {"Answer $ \\frac{1}{2} \\$ = \\frac{10}{9} $": "it says that 1/2 is 10/9, as 8=7 for 7"}
"""Answers that math-verify's tests accept and the reward does not → reason."""


def compare(
    gold: str,
    pred: str,
    match_types: tuple[str, ...] = ("latex", "expr"),
    precision: int = 6,
    strict: bool = True,
    allow_set_relation_comp: bool = False,
) -> bool:
    """Return the verdict of the reward; arguments as of the function of this name in math-verify's tests."""
    targets = tuple(TARGETS[name] for name in match_types)
    right, answer = read(gold, targets), read(pred, targets)
    return accepted(right, answer, digits=precision, strict=strict, allow_set_relation_comp=allow_set_relation_comp)


def cases(module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name of the test and arguments of each case that compares two texts."""
    for name, test in inspect.getmembers(module, inspect.isfunction):
        names = list(inspect.signature(test).parameters)
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "parametrize" and {"gold", "pred"} <= set(names):
                for values in mark.args[1]:
                    yield name, dict(zip([each.strip() for each in mark.args[0].split(",")], values, strict=True))


def differences(folder: Path) -> tuple[int, list[str]]:
    """Return the number of cases of the tests in ``folder``, and those with another verdict."""
    count, wrong = 0, []
    sys.path.insert(0, str(folder.parent))  # they import each other as tests.NAME
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"tests.{path.stem}")
        if hasattr(module, "compare_strings"):
            module.compare_strings = compare  # type: ignore[attr-defined]
        if hasattr(module, "verify") and not hasattr(module, "compare_strings"):
            module.verify = _verify  # type: ignore[attr-defined]
        for name, arguments in cases(module):
            count += 1
            try:
                getattr(module, name)(**arguments)
            except AssertionError:
                if arguments["pred"] not in REFUSED:
                    wrong.append(f"{path.stem}.{name} {arguments}")
    return count, wrong


def _verify(gold: list[Any], answer: list[Any], **settings: Any) -> bool:
    texts = [next((each for each in found if isinstance(each, str)), "") for found in (gold, answer)]
    return accepted(Parsed(texts[0], gold), Parsed(texts[1], answer), **settings)


def main() -> int:
    """Print the result; return the exit code."""
    with tempfile.TemporaryDirectory() as directory:
        release = f"math-verify=={version('math-verify')}"
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", directory]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, release], check=True)
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
        count, wrong = differences(next(Path(directory).glob("*/tests")))
    sys.stdout.write(
        json.dumps({"cases": count, "refused_on_purpose": len(REFUSED), "other_verdicts": wrong}, indent=1) + "\n"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
