"""The processes of SGLang's server that have the model: its schedulers, prepared for rljob.

:mod:`rljob.rollout.adapters.sglang.main` passes :func:`run_scheduler` to SGLang instead of SGLang's own function.
SGLang spawns these processes, so nothing that the server's first process changed is known here.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from rljob.rollout.adapters.sglang import sglang_receiver
from rljob.rollout.adapters.sglang.sglang_files import avoid_shared_memory


def run_scheduler(*args: Any, **options: Any) -> None:
    """Run SGLang's scheduler until it ends; the arguments are SGLang's."""
    keep_store_on_loopback()
    avoid_shared_memory()
    forget_ends(ModelConfig)
    sglang_receiver.install(SchedulerWeightUpdaterManager)
    scheduler.run_scheduler_process(*args, **options)


def keep_store_on_loopback() -> None:
    """Let the store of torch's process group, which any peer could read and write, listen on loopback: TCPStore listens
    on all addresses."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of the name
    plain = rendezvous.TCPStore

    def create(**options: Any) -> Any:
        if options["is_master"]:
            options["master_listen_fd"] = socket.create_server(("127.0.0.1", options["port"])).detach()
        return plain(**options)

    rendezvous.TCPStore = create  # type: ignore[attr-defined]  # of a module


def forget_ends(model_config: Any) -> None:
    """Let no token of the model end a completion: the stop tokens of a request are complete. SGLang's own switch
    (``ignore_eos``) ignores those too. ``model_config``: SGLang's ModelConfig."""
    model_config._get_hf_eos_token_id = lambda self: set()
