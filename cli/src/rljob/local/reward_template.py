"""The files of a new reward: `rljob reward new`."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Mapping
from pathlib import Path

from rljob.local.errors import CliError

REWARD = '''\
"""The reward {name}. Parameters and results: docs/data.md, "What a reward receives and returns"."""

from rljob.rewards.sdk import serve


def reward(completion, problem):
    """Return 1 if the last line of the completion is the row's answer, else 0."""
    lines = completion.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == str(problem["answer"]))


if __name__ == "__main__":
    serve(reward)
'''
TEST = """\
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from {name} import reward


@pytest.mark.parametrize(
    ("completion", "score"),
    [("2", 1.0), ("It is\\n2 ", 1.0), ("It is 2", 0.0), ("3", 0.0), ("", 0.0)],
)
def test_the_last_line_is_the_answer(completion, score):
    assert reward(completion, {{"answer": 2}}) == score
"""
DOCKERFILE = """\
# The image of the reward in a cluster: build it, and name it in the manifest:
#
#   rewards:
#   - name: {manifest_name}
#     function: "{name}:reward"
#     template: {{spec: {{containers: [{{name: main, image: REGISTRY/{name}:1}}]}}}}
ARG BASE=rljob-rewards
FROM ${{BASE}}
COPY {name}.py /opt/rewards/
ENV PYTHONPATH=/opt/rewards
"""


def write(name: str) -> Path:
    """Write the files of the reward ``name`` into a new folder of this name; return the folder.

    Raises:
        CliError: see :func:`write_module`.
    """
    return write_module(name, {f"{name}.py": REWARD, f"test_{name}.py": TEST, "Dockerfile": DOCKERFILE})


def write_module(name: str, texts: Mapping[str, str]) -> Path:
    """Write the files of a new Python module into a new folder of this name; return the folder.

    Args:
        name: of the module.
        texts: file → template of its content with {name} and {manifest_name}.

    Raises:
        CliError: with exit code 2: the name is not one of a new module, or the folder exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise CliError(f"{name!r} is not the name of a module; use lower-case letters, digits and _", 2)
    if name == "conftest" or name.startswith("test_") or name.endswith("_test"):
        raise CliError(f"{name} is a name of pytest's files; give another name", 2)
    folder = Path(name)
    if folder.exists():
        raise CliError(f"{folder} exists; give a name that is not used here", 2)
    if keyword.iskeyword(name) or importlib.util.find_spec(name) is not None:
        taken = "a keyword of Python" if keyword.iskeyword(name) else "an installed Python module"
        raise CliError(f"{name} is {taken}; give another name", 2)
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text.format(name=name, manifest_name=name.replace("_", "-").strip("-")))
    return folder
