"""Makes stand-ins for the CUDA libraries that PyTorch is linked with, for images without a GPU.

The PyTorch of PyPI is the CUDA build. The dynamic loader wants the libraries there that it is linked with, two and a
half gigabytes, though on a machine without a GPU nothing of them is ever called. A stand-in has a library's name and
the functions that PyTorch refers to; whichever is called says so and aborts. (libcudart stays the real one, as
`torch.cuda.is_available()` asks it.)

Usage: no_cuda.py TORCH_LIBRARIES OUTPUT    needs cc and readelf
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REAL = ("libcudart.", "libcuda.")
"""Beginnings of names of libraries that are not stood in for."""
CUDA = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
FUNCTION = """void {name}(void) {{ die("{symbol}"); }}
"""
HEAD = """#include <stdio.h>
#include <stdlib.h>
static void die(const char *name) {
    fprintf(stderr, "%s was called: this image is made for machines without a GPU\\n", name);
    abort();
}
"""


def readelf(option: str, path: Path) -> str:
    """Return what readelf says of a library."""
    return subprocess.run(["readelf", "-W", option, path], check=True, capture_output=True, text=True).stdout


def symbols(path: Path) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the symbols that a library defines, and those it wants with their versions (empty: none)."""
    defined, wanted = set(), set()
    for line in readelf("--dyn-syms", path).splitlines():
        words = line.split()
        if len(words) < 8 or not words[0].rstrip(":").isdigit():
            continue
        name, _, version = words[7].replace("@@", "@").partition("@")
        if words[6] != "UND":
            defined.add(name)
        elif words[4] != "WEAK":
            wanted.add((name, version))
    return defined, wanted


def versions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the versions of symbols that a library wants, with the library it wants them of."""
    library = ""
    for line in readelf("-V", path).splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif found := re.search(r"Name: (\S+) +Flags", line):
            yield found[1], library


def stand_ins(libraries: list[Path]) -> dict[str, dict[str, set[str]]]:
    """Return library → version → the functions that ``libraries`` want of it."""
    needed = {name for path in libraries for name in re.findall(r"Shared library: \[(\S+)\]", readelf("-d", path))}
    needed = {name for name in needed if CUDA.fullmatch(name) and not name.startswith(REAL)}
    homes = {version: name for path in libraries for version, name in versions(path) if name in needed}
    tables = [symbols(path) for path in libraries]
    defined = set().union(*(found for found, _ in tables))
    wanted = {symbol for _, symbols_ in tables for symbol in symbols_ if symbol[0] not in defined}
    found: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in needed}
    for name, version in wanted:
        if version in homes:
            found[homes[version]][version].add(name)
        elif not version and re.match(r"(cu|nccl|nv)[a-zA-Z]", name):
            found[_home(name, needed)][""].add(name)
    return found


def _home(symbol: str, libraries: set[str]) -> str:
    """Return the library whose name begins most like a symbol without a version; any will do for the loader."""

    def alike(library: str) -> int:
        stem = library.removeprefix("lib").partition(".")[0].lower()
        return next(n for n in range(len(stem), -1, -1) if symbol.lower().startswith(stem[:n]))

    return max(sorted(libraries), key=alike)


def build(name: str, functions: dict[str, set[str]], output: Path) -> None:
    """Compile one stand-in."""
    source, script = output / f"{name}.c", output / f"{name}.map"
    every = sorted(set().union(*functions.values()))
    source.write_text(HEAD + "".join(FUNCTION.format(name=symbol, symbol=symbol) for symbol in every))
    nodes = [
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in functions.items() if version
    ]
    script.write_text("".join(nodes))
    versions = [f"-Wl,--version-script={script}"] if nodes else []
    options = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-w", f"-Wl,-soname,{name}", *versions]
    subprocess.run(["cc", *options, "-o", output / name, source], check=True)
    source.unlink()
    script.unlink()


def main() -> None:
    """Do what the command line says."""
    libraries = sorted(Path(sys.argv[1]).glob("*.so"))
    output = Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    for name, functions in sorted(stand_ins(libraries).items()):
        build(name, functions, output)


if __name__ == "__main__":
    main()
