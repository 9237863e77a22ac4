"""Functions of released files of other projects: fetched from the package registry, cut out, executed."""

from __future__ import annotations
import __future__

import ast
import math
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RELEASES = {
    "verl": ("0.7.0", ("verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py")),
    "trl": ("1.16.0", ("trl/trainer/grpo_trainer.py",)),
}
"""Package → version, files."""


def fetch(package: str, directory: Path) -> dict[str, str]:
    """Return the text of the files of a release, by name."""
    version, names = RELEASES[package]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"]
    subprocess.run(command, check=True)
    (archive,) = directory.glob(f"{package}-*")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name).decode() for name in names}
    with tarfile.open(archive) as tar:
        members = {member.name.partition("/")[2]: member for member in tar.getmembers()}
        found = {name: tar.extractfile(members[name]) for name in names}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


class ExactCounts(ast.NodeTransformer):
    """Replaces each divisor ``number + 1e-8`` by ``number``, so that a mean is one."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.BinOp:
        self.generic_visit(node)
        match node:
            case ast.BinOp(op=ast.Div(), right=ast.BinOp(left=number, op=ast.Add(), right=ast.Constant(value=1e-8))):
                node.right = number
        return node


def functions(text: str, namespace: dict[str, Any], exact: bool = False) -> dict[str, Any]:
    """Return all functions and methods of a file by name, without decorators.

    Args:
        text: of the file.
        namespace: names that the functions see beside each other.
        exact: whether they are changed by :class:`ExactCounts`.
    """
    found = dict(namespace)
    tree = ast.parse(text)
    if exact:
        ExactCounts().visit(tree)
    methods = [node for each in tree.body if isinstance(each, ast.ClassDef) for node in each.body]
    for node in [*tree.body, *methods]:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            module = ast.Module([node], [])
            flags = __future__.annotations.compiler_flag
            exec(compile(ast.fix_missing_locations(module), node.name, "exec", flags), found)
    return found


def importance_ratio(text: str, trainer: Any, values: dict[str, Any]) -> Tensor:
    """Execute the block of TRL that computes the weight for the mismatch of vLLM; return the weight.

    Args:
        text: of TRL's file.
        trainer: attributes of the trainer.
        values: local variables of the block.
    """
    blocks = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If) and "vllm_importance_sampling_ratio = torch.exp(" in ast.unparse(node)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
    ]  # fmt: skip
    scope = values | {"self": trainer, "torch": torch, "math": math, "tool_mask": None}
    exec(compile(ast.unparse(blocks[0]), "block", "exec"), scope)
    ratio: Tensor = scope["vllm_importance_sampling_ratio"]
    return ratio


class SeededDraws:
    """The module torch for a function that draws among the places that it found last: the smallest keys come first.

    Args:
        keys: random number of each place.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys, self._found = keys, torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def nonzero(self, *arguments: Any, **options: Any) -> Any:
        """Return the places that are not 0, as torch does, and keep them."""
        self._found = torch.nonzero(*arguments, **options)
        return self._found

    def randperm(self, number: int) -> Tensor:
        """Return the order of the found places by their keys."""
        assert number == len(self._found)
        return self._keys[tuple(self._found.unbind(-1))].argsort()
