"""Makes the test environment of SGLang, unless it exists, and prints its interpreter, for RLJOB_SGLANG_PYTHON.

    python -m tools.sglang

It has SGLang and the packages that .venv lacks (requirements/sglang.txt, 1 GB), and sees those of .venv, rljob's
distributions among them. .venv never has SGLang: triton would change what PyTorch and vLLM do. SGLang requires other
versions of some packages of .venv; its server runs with these. SGLang's kernels are built for GPUs only: ``sgl_kernel``
beside this file takes their place. With it a server computes by PyTorch. It is for tests, and no image has it.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from tools.cached_environment import cached_environment

REQUIREMENTS = Path(__file__).parents[2] / "requirements/sglang.txt"
KERNELS = Path(__file__).with_name("sgl_kernel")


def main() -> None:
    """Print the interpreter."""
    below = sysconfig.get_path("purelib")

    def prepare(packages: Path) -> None:
        shutil.copytree(KERNELS, packages / KERNELS.name, ignore=shutil.ignore_patterns("__pycache__"))
        # A path in a .pth file would not read the .pth files of rljob's distributions, which are in that directory.
        (packages / "rljob.pth").write_text(f"import site; site.addsitedir({below!r})\n")

    inputs = b"\0".join([below.encode(), (KERNELS / "__init__.py").read_bytes(), Path(__file__).read_bytes()])
    sys.stdout.write(f"{cached_environment('sglang', REQUIREMENTS, inputs, prepare)}\n")


if __name__ == "__main__":
    main()
