"""Entry point of vLLM's server, as rljob's agent starts it.

    python -m rljob.rollout.adapters.vllm.main [vLLM's arguments]

vLLM's own entry point with two differences: settings that vLLM refuses end it with code 2, and on CPU the engine
process is forked from the server instead of spawned, which halves the time to start (9 s instead of 16 s on two cores)
because torch and vLLM are imported once.
"""

import multiprocessing
import sys
import traceback

from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.rollout.adapters.vllm.expected_warnings import WARM_UP, is_warm_up_warning
from rljob.rollout.log_filter import drop_records


def main() -> None:
    """Run the server."""
    import vllm.v1.engine.utils as engine_processes
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform

    drop_records(WARM_UP, is_warm_up_warning)
    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401  imported before the fork, once

        engine_processes.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        entry.main()
    except ValueError:  # settings that vLLM refuses: another start would fail too
        traceback.print_exc()
        sys.exit(CONFIGURATION_ERROR)


if __name__ == "__main__":
    main()
