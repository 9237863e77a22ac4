"""The behaviour of pods on simulated nodes (kwok), controlled by annotations.

By default a pod is Running and Ready at once, the pods of an initializer and of a backup
complete, and a deleted pod exits with code 143.
Annotations change this, in a pod template (for all its pods) or on one existing pod:

    kwok.rljob.dev/behaviour   never-ready: the pod runs, but is not Ready until the annotation is removed
                               image-pull-backoff, creating: the pod does not start
                               lingering: after its deletion the pod does not terminate
    kwok.rljob.dev/exit-code   the containers exit with this code; they are restarted into CrashLoopBackOff if the
                               restart policy is Always
    kwok.rljob.dev/message     termination message of the containers
"""

from __future__ import annotations

from tools.cluster.client import Api, Object

BEHAVIOUR = "kwok.rljob.dev/behaviour"
BEHAVIOURS = ("never-ready", "image-pull-backoff", "creating", "lingering")
EXIT_CODE = "kwok.rljob.dev/exit-code"
MESSAGE = "kwok.rljob.dev/message"


class Pods:
    """Controls pods through the API of one cluster; kwok reacts within a fraction of a second."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def behave(self, namespace: str, name: str, behaviour: str | None) -> None:
        """Give the pod one of BEHAVIOURS, or the default behaviour."""
        assert behaviour is None or behaviour in BEHAVIOURS, behaviour
        self._annotate(namespace, name, {BEHAVIOUR: behaviour})

    def exit(self, namespace: str, name: str, code: int, message: str = "") -> None:
        """End the pod's containers with ``code``."""
        self._annotate(namespace, name, {EXIT_CODE: str(code), MESSAGE: message})

    def recover(self, namespace: str, name: str) -> None:
        """Let a pod in CrashLoopBackOff run again."""
        self._annotate(namespace, name, {EXIT_CODE: None, MESSAGE: None, BEHAVIOUR: None})

    def restart(self, namespace: str, name: str, code: int, message: str = "") -> Object:
        """Record that every container exited with ``code`` and was restarted; return the pod."""
        path = _path(namespace, name)
        pod = self._api.get(path)
        for container in pod["status"]["containerStatuses"]:
            started = container["state"].get("running", {}).get("startedAt", pod["status"]["startTime"])
            ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}
            container["lastState"] = {"terminated": {**ended, "startedAt": started, "finishedAt": started}}
            container["restartCount"] += 1
        return self._api.put(f"{path}/status", pod)

    def evict(self, namespace: str, name: str) -> None:
        """Evict the pod, as the drain of a node does: it gets the condition DisruptionTarget and is deleted.

        Raises:
            ApiError: a PodDisruptionBudget forbids it (429).
        """
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        self._api.post(f"{_path(namespace, name)}/eviction", body)

    def _annotate(self, namespace: str, name: str, annotations: dict[str, str | None]) -> None:
        self._api.patch(_path(namespace, name), {"metadata": {"annotations": annotations}})


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"
