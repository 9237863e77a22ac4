"""Middleware that vLLM's server loads by name; its key is in the environment.

vLLM's own check covers /v1, /v2, /inference and /cohere, but not the routes of its development mode.
"""

from __future__ import annotations

import os

from rljob.rollout.auth_middleware import Application, RequireKey

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own; in the environment because every user can read a command line


class RequireVllmKey(RequireKey):
    """:class:`RequireKey` with the key of vLLM's own check."""

    def __init__(self, app: Application) -> None:
        super().__init__(app, os.environ[KEY_VARIABLE])
