"""Renders an RLJob as Kubernetes objects, by pure functions."""

from rljob.manifests.hashes import spec_hash
from rljob.manifests.names import secret_name
from rljob.manifests.problems import problems
from rljob.manifests.render import ALL_TOKENS, CLIENT_ROLES, TOKEN_ROLES, render, secret

__all__ = ["ALL_TOKENS", "CLIENT_ROLES", "TOKEN_ROLES", "problems", "render", "secret", "secret_name", "spec_hash"]
