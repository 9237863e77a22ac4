"""Errors of clusters whose messages are for users."""

from __future__ import annotations

from tools.cluster.build import BuildError
from tools.cluster.node import MachineError, NoClusterError, NotAllowedError
from tools.cluster.node.install import InstallError
from tools.cluster.node.system import CommandError
from tools.cluster.toolchain import NoToolchainError

REFUSED = (MachineError, NotAllowedError)
"""This machine or the requested context cannot be used; nothing was started."""
FAILED = (BuildError, NoToolchainError, NoClusterError, CommandError, InstallError, TimeoutError)
"""A program could not be built, or the cluster or rljob in it could not be started."""
