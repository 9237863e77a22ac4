"""Asks vLLM whether it knows some arguments of its server; exits with code 2 and argparse's words when it does not:

python -m rljob.rollout.vllm_engine.arguments [vLLM's arguments]
"""

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    make_arg_parser(FlexibleArgumentParser()).parse_args()
