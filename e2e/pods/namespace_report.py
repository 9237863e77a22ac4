"""Report of a namespace for the message of a failed test: jobs, pods, events, the ends of logs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tools.cluster.node import Cluster

LOG_LINES = 25
LINE_CHARACTERS = 300
EVENTS = 40
JOBS = "rljobs.rljob.dev"


def namespace_report(node: Cluster, namespace: str) -> str:
    """Return jobs, pods, events and the ends of logs of a namespace."""
    return "\n".join(_tell(node, namespace))


def _tell(node: Cluster, namespace: str) -> Iterator[str]:
    yield from _jobs(_try(node, namespace, "get", JOBS, "-o", "json"))
    for command in (("get", "pods,jobs,pvc", "-o", "wide"), ("get", "events", "--sort-by=.metadata.resourceVersion")):
        yield f"--- kubectl {' '.join(command)}"
        yield from _try(node, namespace, *command).splitlines()[-EVENTS:]
    for pod in _try(node, namespace, "get", "pods", "-o", "name").split():
        for previous in ((), ("--previous",)):
            log = _try(node, namespace, "logs", pod, f"--tail={LOG_LINES}", *previous)
            if log and not (previous and log.startswith("kubectl ")):  # there was no container before this one
                yield f"--- {pod} {' '.join(previous)}"
                yield from (line[:LINE_CHARACTERS] for line in log.splitlines())


def _jobs(listed: str) -> Iterator[str]:
    try:
        found = json.loads(listed)["items"]
    except ValueError:
        yield listed
        return
    for job in found:
        status = job.get("status", {})
        yield f"--- {job['metadata']['name']}"
        for each in status.get("conditions", ()):
            yield f"{each['type']}={each['status']} {each['reason']}: {each.get('message', '')}"
        for role in status.get("roles", ()):
            yield json.dumps(role)
        for name in ("trainer", "draining", "run"):
            value = status.get(name)
            yield f"{name}: {json.dumps({**value, 'metrics': '…'} if name == 'run' and value else value)}"


def _try(node: Cluster, namespace: str, *command: str) -> str:
    try:
        return node.kubectl("-n", namespace, *command)
    except RuntimeError as error:
        return str(error)
