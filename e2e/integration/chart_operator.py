"""The operator of an installed release, as a process: simulated nodes run no containers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rljob.protocol.free_port import free_port
from tools.cluster.controlplane import ControlPlane

SYSTEM, OPERATOR = "rljob-system", "rljob-operator"
"""Namespace and name of the operator of a release ``rljob``, as in docs/kubernetes.md."""
STOP_SECONDS = 30.0


class ChartOperator:
    """The command of the release's Deployment, with its settings and its service account, while the Deployment exists.

    Args:
        plane: the cluster.
        where: directory for the settings and the log.
    """

    def __init__(self, plane: ControlPlane, where: Path) -> None:
        self._plane, self._where = plane, where
        self.log = where / "operator.log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def follow(self) -> None:
        """Start or stop it, as the controller of the Deployment would."""
        exists = self._plane.api.exists(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{OPERATOR}")
        if exists and self.process is None:
            self.start()
        elif not exists and self.process is not None:
            self.stop()

    def start(self, sources: Sequence[Path] = ()) -> None:
        """Start it. ``sources``: directories with other sources of rljob, which win over the installed ones."""
        assert self.process is None
        config = self._plane.api.get(f"/api/v1/namespaces/{SYSTEM}/configmaps/{OPERATOR}")
        settings = json.loads(config["data"]["operator.json"]) | {"listen": "127.0.0.1:0"}
        (self._where / "operator.json").write_text(json.dumps(settings))
        kubeconfig = self._plane.service_account_kubeconfig(SYSTEM, OPERATOR)
        deployment = self._plane.api.get(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{OPERATOR}")
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        words = (*container["command"], *container.get("args", ()))
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        command = [word.replace("/etc/rljob/", f"{self._where}/") for word in words]
        command = [re.sub(r"127\.0\.0\.1:\d+", address, word) for word in command]
        environment = {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": SYSTEM, "POD_NAME": "operator"}
        environment["PYTHONPATH"] = ":".join(map(str, sources))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command[1:]], env=dict(os.environ) | environment, stderr=log, cwd=self._where
            )

    def stop(self) -> None:
        """Stop it as a kubelet does, so that it releases its Lease."""
        process, self.process = self.process, None
        assert process is not None and process.poll() is None, self.log.read_text()
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
