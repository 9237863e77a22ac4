"""Entry point of SGLang's server, as rljob's agent starts it.

    python -m rljob.rollout.adapters.sglang.main [SGLang's arguments]

Runs SGLang's HTTP server with some differences. Every route needs the key of this start. Peers without it are
limited. Settings that SGLang refuses end the server with exit code 2, a failure of one of its processes with 1. The
scheduler is prepared by :mod:`rljob.rollout.adapters.sglang.sglang_scheduler`.
"""

import os
import sys
import traceback
from typing import Any

from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE
from rljob.rollout.adapters.http_client import KEEP_ALIVE_SECONDS
from rljob.rollout.auth_middleware import RequireKey
from rljob.rollout.engine_protocol import EngineProtocol

KEY_VARIABLE = "RLJOB_SGLANG_KEY"
HEAD_BYTES = 64 << 10  # request line and headers of one request
LIMITS = {
    "http": EngineProtocol,
    "ws": "none",  # the agent uses no WebSocket of SGLang
    "h11_max_incomplete_event_size": HEAD_BYTES,
    "timeout_keep_alive": 6 * KEEP_ALIVE_SECONDS,
    "access_log": False,
}


def set_limits(config: Any) -> None:
    """Let ``config``, uvicorn's Config, have LIMITS: SGLang has no options for them."""
    plain = config.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options | LIMITS)

    config.__init__ = init


def main() -> None:
    """Run the server."""
    import uvicorn
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import SignalHandler
    from sglang.srt.server_args import prepare_server_args

    from rljob.rollout.adapters.sglang.sglang_exit import end_at_failures, end_with
    from rljob.rollout.adapters.sglang.sglang_files import avoid_shared_memory
    from rljob.rollout.adapters.sglang.sglang_scheduler import run_scheduler

    set_limits(uvicorn.Config)
    avoid_shared_memory()
    try:
        arguments = prepare_server_args(sys.argv[1:])
        end_at_failures(arguments, SignalHandler)
        arguments.resolve_once()
    except ValueError:  # settings that SGLang refuses: another start would fail too
        traceback.print_exc()
        sys.exit(CONFIGURATION_ERROR)
    # It calls the server before the server listens, and without the key.
    http_server._freeze_gc_after_server_warmup = lambda arguments: None
    http_server.app.add_middleware(RequireKey, key=os.environ[KEY_VARIABLE])
    code = 0
    try:
        http_server.launch_server(arguments, run_scheduler_process_func=run_scheduler)
    except SystemExit as end:  # uvicorn cannot listen, and has logged it
        code = end.code if isinstance(end.code, int) else FAILURE
    except BaseException:  # noqa: BLE001 whatever it is, it is printed
        traceback.print_exc()
        code = FAILURE
    sys.stdout.flush()
    end_with(code)


if __name__ == "__main__":
    main()
