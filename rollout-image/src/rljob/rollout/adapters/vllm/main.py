"""Entry point of vLLM's server, as rljob's agent starts it.

    python -m rljob.rollout.adapters.vllm.main [vLLM's arguments]

Runs vLLM's entry point with seven differences. Peers without the key are limited. Settings that vLLM refuses end
the server with exit code 2. The signal that kills the engine process is logged. No process outlives the one that
started it. Stores of torch listen on loopback. On CPU processes are forked instead of spawned, so torch and vLLM are
imported once: the start takes 9 s instead of 16 s on two cores. On CPU pipelines of eager models work.
"""

import multiprocessing
import socket
import sys
import traceback
from functools import partial
from typing import Any

from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.rollout.adapters.vllm.ending_processes import ending_context
from rljob.rollout.adapters.vllm.engine_exit import report_kills
from rljob.rollout.adapters.vllm.expected_warnings import WARM_UP, is_warm_up_warning
from rljob.rollout.log_filter import drop_records


def limit_connections() -> None:
    """Let uvicorn limit what a peer without the key can take: vLLM has no option for it. It sets the bytes of the
    headers (``--h11-max-incomplete-event-size``) only, which httptools, uvicorn's first choice, ignores."""
    import uvicorn.config

    uvicorn.config.HTTP_PROTOCOLS["auto"] = "rljob.rollout.engine_protocol:EngineProtocol"
    uvicorn.config.WS_PROTOCOLS["auto"] = "rljob.protocol.websocket_protocol:WebSocketProtocol"


def prepare_pipelines(runner: Any) -> None:
    """Let a stage of a pipeline on a CPU make its buffer for the output of the previous stage when it has loaded the
    model. vLLM makes it in a warm-up, which it skips for eager models. ``runner``: vLLM's CPUModelRunner."""
    plain = runner.load_model

    def load_model(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if self.parallel_config.pipeline_parallel_size > 1:
            size, dtype = self.max_num_tokens, self.model_config.dtype
            make = self.model.make_empty_intermediate_tensors
            self.intermediate_tensors = make(batch_size=size, dtype=dtype, device=self.device)

    runner.load_model = load_model


def keep_stores_on_loopback(module: Any) -> None:
    """Let the stores of vLLM's processes, which any peer could read and write, listen on loopback: torch's TCPStore
    listens on all addresses. ``module``: vllm.distributed.utils."""
    plain = module.create_tcp_store

    def create(host: str, port: int, listen_socket: socket.socket | None = None, **options: Any) -> Any:
        if listen_socket is None and options.get("is_master"):
            listen_socket = socket.create_server(("127.0.0.1", port))
            port = listen_socket.getsockname()[1]
        return plain(host, port, listen_socket, **options)

    module.create_tcp_store = create


def main() -> None:
    """Run the server."""
    limit_connections()
    import vllm.distributed.utils as stores
    import vllm.v1.engine.coordinator as replica_coordinator
    import vllm.v1.engine.utils as engine_processes
    import vllm.v1.executor.multiproc_executor as workers
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform
    from vllm.utils.system_utils import get_mp_context

    report_kills(engine_processes.CoreEngineProcManager)
    drop_records(WARM_UP, is_warm_up_warning)
    keep_stores_on_loopback(stores)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUModelRunner  # before the fork, so that no child imports it again

        prepare_pipelines(CPUModelRunner)
        get_mp_context = workers.get_mp_context = partial(multiprocessing.get_context, "fork")
    engine_processes.get_mp_context = replica_coordinator.get_mp_context = partial(ending_context, get_mp_context)
    try:
        entry.main()
    except ValueError:  # settings that vLLM refuses: another start would fail too
        traceback.print_exc()
        sys.exit(CONFIGURATION_ERROR)


if __name__ == "__main__":
    main()
