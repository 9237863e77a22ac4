"""Entry point of SGLang's server, as rljob's agent starts it.

    python -m rljob.rollout.adapters.sglang.main [SGLang's arguments]

Runs SGLang's HTTP server with five differences. Every route needs the key of this start. Peers without it are
limited. Settings that SGLang refuses end the server with exit code 2, a failure of one of its processes with 1. The
scheduler is prepared by :mod:`rljob.rollout.adapters.sglang.sglang_scheduler`.
"""

import os
import sys
import traceback
from typing import Any

from rljob.protocol.exit_codes import CONFIGURATION_ERROR
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
    from sglang.srt.utils import kill_process_tree

    from rljob.rollout.adapters.sglang.sglang_exit import end_at_failures
    from rljob.rollout.adapters.sglang.sglang_scheduler import run_scheduler

    set_limits(uvicorn.Config)
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
    try:
        http_server.launch_server(arguments, run_scheduler_process_func=run_scheduler)
    finally:  # Python would wait for the other processes
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
