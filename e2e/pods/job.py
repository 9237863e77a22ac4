"""A job whose components run in pods, as its user and a test see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from tools.cluster.client import VERSIONS, ApiError, Object, Objects
from tools.cluster.node import Cluster

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.yaml"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace that takes no other pods."""
WAIT_FOR_SIGTERM = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
sys.exit(128 + signal.sigwait([signal.SIGTERM]))
"""
"""Program of an idle container. It blocks SIGTERM first: the kernel drops an unblocked signal without a handler in the
first process of a container, and the pod would take its whole grace period, 30 s, to end. The exit code is not 0, as
that of the trainer: a Kubernetes Job would take 0 for a complete training."""
IDLE_RESOURCES = {"requests": {"cpu": "10m", "memory": "32Mi"}}
"""Resources of an idle container: room on the node is for the jobs that train at the same time."""
GPU_ROLES = ("trainer", "rollout-main")
CHILDREN = (
    *(kind for kind in VERSIONS if kind not in ("RLJob", "RayCluster")),
    *("Service", "ConfigMap", "Secret", "ServiceAccount", "PersistentVolumeClaim", "Pod"),
)
"""Kinds that a job consists of in a cluster without other projects."""
READ = """
import json, os, sqlite3, sys
directory = os.environ.get("RLJOB_LEDGER", "/var/lib/rljob")
ledger = sqlite3.connect(f"file:{directory}/ledger.sqlite?mode=ro", uri=True, timeout=30)
ledger.row_factory = sqlite3.Row
print(json.dumps([dict(row) for row in ledger.execute(sys.argv[1])]))
"""
"""What the coordinator's pod is asked to run, as the ledger is written by it alone."""
MODEL = """
import pathlib, sys
from rljob.protocol import environment as e
from rljob.trainer.example_model import Recipe, build
build(pathlib.Path(sys.argv[1]), e.read_environment().job.spec.tasks[0], 1, Recipe(working_steps=200, bare_steps=20))
"""
SMALL_MODEL = {"command": ["python", "-c", MODEL, "job://model"]}
"""An initializer that takes a quarter of the quickstart's time: its model is right now and then, so weights move."""
ANSWER_SECONDS = 60.0
T = TypeVar("T")


def quickstart(**spec: Any) -> Object:
    """Return the quickstart's manifest; ``spec`` replaces fields of its spec."""
    body: Object = yaml.safe_load(QUICKSTART.read_text())
    body["spec"] |= spec
    return body


class Job:
    """One job in a namespace of a cluster.

    Args:
        node: the cluster.
        namespace: its namespace.
        body: its manifest.
    """

    def __init__(self, node: Cluster, namespace: str, body: Object) -> None:
        self.node, self.namespace, self.body = node, namespace, body
        self.name: str = body["metadata"]["name"]

    # --- what a user does ---------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return self.node.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def apply(self) -> None:
        """Apply the manifest as a user does."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(self.body))

    def change(self, **spec: Any) -> None:
        """Change fields of the spec."""
        self.node.api.patch(self._path("RLJob", self.name), {"spec": spec})

    def scale(self, role: str, replicas: int) -> None:
        """Ask for so many pods of a role."""
        self.kubectl("scale", f"rljobscale/{self.name}-{role}", f"--replicas={replicas}")

    def delete(self) -> None:
        """Delete the job."""
        self.node.api.delete(self._path("RLJob", self.name))

    def delete_pods(self, *pods: Object) -> None:
        """Delete pods as a user does; they are not waited for."""
        self.kubectl("delete", "pod", *(pod["metadata"]["name"] for pod in pods), "--wait=false")

    # --- what Kubernetes says -----------------------------------------------------------------------------------------

    def status(self) -> Object:
        """Return the status of the RLJob."""
        found: Object = self.node.api.get(self._path("RLJob", self.name)).get("status", {})
        return found

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition; empty texts when there is none."""
        for each in self.status().get("conditions", ()):
            if each["type"] == kind:
                return each["status"], each["reason"], each.get("message", "")
        return "", "", ""

    def pods(self, role: str = "") -> Objects:
        """Return the pods, or those of a role, by name, but for those that have ended or are about to."""
        selector = f"rljob.dev/job={self.name}" + (f",rljob.dev/role={role}" if role else "")
        found = self.node.api.list(self._path("Pod"), labelSelector=selector)
        living = [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        ]
        return sorted(living, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, role: str) -> Object:
        """Return the one pod of a role."""
        (found,) = self.pods(role)
        return found

    def lives(self, *but: str) -> dict[str, tuple[str, int]]:
        """Return who lives: pod → its uid and how often its container was started again, but for some roles."""
        return {
            pod["metadata"]["name"]: (pod["metadata"]["uid"], restarts_of(pod))
            for pod in self.pods()
            if pod["metadata"]["labels"]["rljob.dev/role"] not in but
        }

    def children(self) -> dict[str, Object]:
        """Return the objects of the job as KIND/NAME → object."""
        found = {}
        for kind in CHILDREN:
            for each in self.node.api.list(self._path(kind), labelSelector=f"rljob.dev/job={self.name}"):
                found[f"{kind}/{each['metadata']['name']}"] = each
        return found

    def get(self, kind: str, name: str) -> Object | None:
        """Return an object of the namespace, if it is there."""
        return self.node.api.get_or_none(self._path(kind, name))

    # --- what the run says --------------------------------------------------------------------------------------------

    def live(self) -> Object:
        """Return what the coordinator says now.

        Raises:
            ApiError, OSError: it does not answer.
        """
        service = f"{self._path('Service', f'{self.name}-coordinator')}:8080/proxy/v1/status"
        found: Object = self.node.api.get(service)
        return found

    def run_status(self) -> Object:
        """Return the coordinator's status as soon as it answers."""
        return self.until(self.live, ANSWER_SECONDS, "the coordinator to answer")

    def step(self) -> int:
        """Return how many batches were applied."""
        return int(self.run_status()["progress"]["step"])

    def ledger(self, query: str) -> list[dict[str, Any]]:
        """Return rows of the run's ledger."""
        rows: list[dict[str, Any]] = json.loads(self.python(READ, query))
        return rows

    def audit(self) -> dict[str, Any]:
        """Return what `rljob audit` says of the run."""
        report: dict[str, Any] = json.loads(self.rljob("audit", self.name, "-o", "json"))
        return report

    def rljob(self, *arguments: str) -> str:
        """Run a command of rljob on the job's namespace and return what it writes."""
        command = [sys.executable, "-m", "rljob.cli.main", *arguments, "-n", self.namespace]
        environment = os.environ | {"KUBECONFIG": str(self.node.kubeconfig)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"rljob {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def python(self, program: str, *arguments: str) -> str:
        """Run a program in the coordinator's pod and return what it writes."""
        return self.kubectl("exec", f"{self.name}-coordinator-0", "--", "python", "-c", program, *arguments)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until(self, what: Callable[[], T | Literal[False]], seconds: float, wanted: str) -> T:
        """Return the first true value of ``what``; trouble with a request counts as not yet."""
        deadline, last = time.monotonic() + seconds, ""
        while True:
            try:
                if found := what():
                    return found
                last = repr(found)
            except (ApiError, OSError, RuntimeError, LookupError, ValueError) as error:  # a pod that is just starting
                last = repr(error)
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:g} s: {wanted}; last seen: {last[:500]}")
            if self.condition("Failed")[0] == "True" and wanted != "Failed":
                raise AssertionError(f"the job failed before: {wanted}: {self.condition('Failed')}")
            time.sleep(0.25)

    def reaches(self, step: int, seconds: float) -> int:
        """Wait until ``step`` batches were applied."""

        def there() -> Object | Literal[False]:
            live = self.live()
            return live["progress"]["step"] >= step and live

        return int(self.until(there, seconds, f"step {step}")["progress"]["step"])

    def has_reason(self, kind: str, reason: str, seconds: float) -> str:
        """Wait until a condition has a reason; return its message."""
        wanted = "Failed" if kind == "Failed" else f"{kind} to be {reason}"
        return self.until(lambda: (found := self.condition(kind))[1] == reason and found, seconds, wanted)[2]

    def all_up(self, seconds: float) -> None:
        """Wait until every role has pods and all are ready. A suspended job has 0 of 0."""

        def up() -> bool:
            roles = self.status().get("roles", ())
            return bool(roles) and all(role["ready"] == role["desired"] > 0 for role in roles)

        self.until(up, seconds, "all roles to be ready")

    def has_pods(self, role: str, count: int, seconds: float) -> Objects:
        """Wait until a role has so many pods and all are ready."""
        return self.until(
            lambda: len(pods := self.pods(role)) == count and all(map(is_ready, pods)) and pods,
            seconds,
            f"{count} ready pods of {role}",
        )

    def until_gone(self, seconds: float, *but: str) -> None:
        """Wait until nothing of the job is there but some objects (KIND/NAME)."""
        deadline = time.monotonic() + seconds
        while (left := set(self.children())) != set(but):
            assert time.monotonic() < deadline, f"after {seconds:g} s there is {sorted(left)}"
            time.sleep(0.25)

    def _path(self, kind: str, name: str | None = None) -> str:
        return self.node.api.path(VERSIONS.get(kind, "v1"), kind, self.namespace, name)


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def restarts_of(pod: Object) -> int:
    """Return how often the containers of a pod were started again."""
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))
