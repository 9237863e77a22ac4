"""The server of a transformers model, with one corrupted update."""

import sys

from mypackage.server import serve
from qwen.server import QwenServer

import corrupt.wire  # noqa: F401

if __name__ == "__main__":
    serve(QwenServer(sys.argv[1]))
