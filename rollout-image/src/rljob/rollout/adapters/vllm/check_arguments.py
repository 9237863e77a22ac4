"""Checks arguments of vLLM's server with its own parser; exits with code 2 and argparse's message if it refuses them.

python -m rljob.rollout.adapters.vllm.check_arguments [vLLM's arguments]
"""

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    make_arg_parser(FlexibleArgumentParser()).parse_args()
