"""Entry point of vLLM's server, as rljob's agent starts it.

    python -m rljob.rollout.adapters.vllm.main [vLLM's arguments]

Runs vLLM's entry point with four differences. The headers of a request are bounded. Settings that vLLM refuses end the
server with exit code 2. The signal that kills the engine process is logged. On CPU the engine process is forked from
the server instead of spawned, so torch and vLLM are imported once: the start takes 9 s instead of 16 s on two cores.
"""

import multiprocessing
import sys
import traceback

from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.rollout.adapters.vllm.engine_exit import report_kills
from rljob.rollout.adapters.vllm.expected_warnings import WARM_UP, is_warm_up_warning
from rljob.rollout.log_filter import drop_records


def bound_headers() -> None:
    """Let uvicorn use h11, whose limit vLLM sets (``--h11-max-incomplete-event-size``). uvicorn prefers httptools,
    which has no limit, and vLLM has no option for it."""
    import uvicorn.config

    uvicorn.config.HTTP_PROTOCOLS["auto"] = uvicorn.config.HTTP_PROTOCOLS["h11"]


def main() -> None:
    """Run the server."""
    bound_headers()
    import vllm.v1.engine.utils as engine_processes
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform

    report_kills(engine_processes.CoreEngineProcManager)
    drop_records(WARM_UP, is_warm_up_warning)
    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401  import before the fork, so that the child does not repeat it

        engine_processes.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        entry.main()
    except ValueError:  # settings that vLLM refuses: another start would fail too
        traceback.print_exc()
        sys.exit(CONFIGURATION_ERROR)


if __name__ == "__main__":
    main()
