"""Entry point of an engine: vLLM's server, as rljob's agent starts it.

    python -m rljob.rollout.vllm_engine.main AGENT_PID [vLLM's arguments]

vLLM's own entry point with two differences: the server dies with its agent, and on CPU the engine process is forked
from the server instead of spawned, which halves the time to start (9 s instead of 16 s on two cores) because torch and
vLLM are imported once.
"""

import logging
import multiprocessing
import sys
import traceback

from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.parent_death import die_with_parent


def main() -> None:
    """Run the server."""
    die_with_parent(int(sys.argv.pop(1)))

    import vllm.v1.engine.utils as engine_processes
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform

    # Without a tokenizer the warm-up of the chat template fails, with a traceback that means nothing.
    logging.getLogger("vllm.renderers.base").addFilter(lambda record: "warmup failed" not in record.msg)
    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401  imported before the fork, once

        engine_processes.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        entry.main()
    except ValueError:  # settings that vLLM refuses: another start would end the same
        traceback.print_exc()
        sys.exit(CONFIGURATION_ERROR)


if __name__ == "__main__":
    main()
