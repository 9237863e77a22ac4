"""Checks arguments of SGLang's server with its own parser; exits with code 2 and argparse's message if it refuses them.

python -m rljob.rollout.adapters.sglang.sglang_arguments [SGLang's arguments]
"""

import argparse
import sys

from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.parse_args(["--model-path", "model", *sys.argv[1:]])
