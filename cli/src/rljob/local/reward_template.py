"""The files of a new reward: `rljob reward new`."""

from __future__ import annotations

from pathlib import Path

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
COPY {name}.py /opt/rljob/lib/python3.11/site-packages/
"""


def write(folder: Path, name: str) -> None:
    """Write the files of the reward ``name``, a module, into a new folder."""
    folder.mkdir(parents=True)
    texts = {f"{name}.py": REWARD, f"test_{name}.py": TEST, "Dockerfile": DOCKERFILE}
    for file, text in texts.items():
        (folder / file).write_text(text.format(name=name, manifest_name=name.replace("_", "-").strip("-")))
