"""Middleware that vLLM's server loads by name: the key of all routes, and rljob's own routes behind it. The environment
holds the key.

vLLM's own check covers /v1, /v2, /inference and /cohere, but not the routes of its development mode.
"""

from __future__ import annotations

import os

from rljob.rollout.adapters.vllm.update_routes import UpdateRoutes
from rljob.rollout.auth_middleware import Application, RequireKey

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's variable; a command line would be readable by every user


class RequireVllmKey(RequireKey):
    """:class:`RequireKey` with the key that vLLM's own check uses."""

    def __init__(self, app: Application) -> None:
        super().__init__(UpdateRoutes(app), os.environ[KEY_VARIABLE])
