"""Asks the coordinator of an RLJob, and says why it cannot be asked."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from rljob.api.pods import READERS_PORT
from rljob.kube.sync_client import Object
from rljob.local.errors import RunError
from rljob.manifests.names import claim_name
from rljob.remote import forwarding
from rljob.remote.absent import unseen
from rljob.remote.api import FORBIDDEN, UNAUTHORIZED, RefusedError
from rljob.remote.finding import COORDINATOR, Namespace, conditions, goes_on, holds

NOTE = "Rljob-Note"
T = TypeVar("T")


class SilentError(RunError):
    """The coordinator cannot be asked; the sentence says why."""


class _Error(msgspec.Struct):
    error: str = ""
    detail: Any = None


class Coordinator:
    """The coordinator of an RLJob.

    Args:
        namespace: of the job.
        body: the RLJob.
        patience: seconds, between two pieces of an answer.
    """

    def __init__(self, namespace: Namespace, body: Object, patience: float = forwarding.SILENCE_SECONDS) -> None:
        self._namespace, self._body, self._patience = namespace, body, patience
        self._name = str(body["metadata"]["name"])

    def ask(self, path: str, kind: type[T], /, **query: Any) -> tuple[T, str]:
        """Return the answer, and the note beside it.

        Raises:
            SilentError: the coordinator does not run or does not answer.
            RunError: with exit code 2: there is nothing like that; or forwarding is not allowed.
        """
        with self.open(path, **query) as answer:
            data = _whole(answer)
            note = answer.getheader(NOTE) or ""
        try:
            return msgspec.json.decode(data, type=kind), note
        except msgspec.ValidationError:
            with contextlib.suppress(msgspec.MsgspecError):
                if sentence := msgspec.json.decode(data, type=_Error).error:
                    raise RunError(sentence, 2) from None
            raise RunError(
                f"the coordinator of {self._name} is of another version of rljob; use the command line of that version"
            ) from None
        except msgspec.DecodeError:
            raise SilentError(
                f"the coordinator of {self._name} broke off in the middle of its answer; try again"
            ) from None

    @contextlib.contextmanager
    def open(self, path: str, /, **query: Any) -> Iterator[http.client.HTTPResponse]:
        """Give the answer to a GET. Raises as :meth:`ask`."""
        asked = {name: value for name, value in query.items() if value is not None}
        whole = f"{quote(path)}?{urlencode(asked)}" if asked else quote(path)
        pod = self._pod()
        try:
            answer = forwarding.get(
                self._namespace.api, self._namespace.name, pod["metadata"]["name"], READERS_PORT, whole, self._patience
            )
        except forwarding.HandshakeError as error:  # which says nothing of the coordinator
            raise SilentError(error.sentence) from None
        except forwarding.ForwardError as error:
            raise self._silent(error) from None
        except RefusedError as error:
            if error.code in (UNAUTHORIZED, FORBIDDEN):
                raise
            raise self._silent(error) from None
        with answer:
            try:
                if answer.status >= http.HTTPStatus.BAD_REQUEST:
                    raise _refused(self._name, answer.status, _whole(answer))
                yield answer
            except forwarding.ForwardError as error:  # in the middle of it
                raise self._silent(error) from None

    def _pod(self) -> Object:
        running = self._running()
        if not running:
            raise SilentError(self.why_silent())
        return running[-1]

    def _running(self) -> list[Object]:
        pods = self._namespace.pods(self._name, COORDINATOR)
        return [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]

    def _silent(self, error: RunError) -> SilentError:
        """Return what is said when it was tried: of a job that goes on also what came of it."""
        if goes_on(self._body):
            return SilentError(f"{self.why_silent()} ({error.sentence})")
        # Of one that has ended the pod may have left meanwhile; if it has not, what it has is not lost.
        if any("deletionTimestamp" not in pod["metadata"] for pod in self._running()):
            return SilentError(f"the coordinator of {self._name} does not answer: {error.sentence}; try again")
        return SilentError(self.why_silent())

    def why_silent(self) -> str:
        """Return why there is no coordinator, and what can be done all the same, as the RLJob knows it."""
        name, met = self._name, conditions(self._body)
        kept = f"its claim {self.claim} keeps ledger and checkpoints, and rljob status shows how it ended"
        for condition, ended in (("Complete", "has succeeded"), ("Failed", "has failed")):
            if holds(self._body, condition):
                return f"{name} {ended} and its coordinator has gone (spec.keepCoordinatorSeconds); {kept}"
        if holds(self._body, "Suspended"):
            return (
                f"{name} is suspended and has no pods; rljob resume goes on with it, and its claim {self.claim} "
                "keeps ledger and checkpoints"
            )
        if "Ready" not in met:
            return unseen(name)
        reason, message = met["Ready"]["reason"], met["Ready"]["message"]
        return f"the coordinator of {name} does not answer; the RLJob says {reason}: {message}"

    @property
    def claim(self) -> str:
        """The claim that keeps its ledger and checkpoints."""
        return claim_name(self._name, (self._body["spec"].get("storage") or {}).get("claim"))


def _whole(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read()
    except http.client.HTTPException as error:
        raise SilentError(f"the coordinator broke off in the middle of its answer: {error}; try again") from None


def _refused(name: str, code: int, data: bytes) -> RunError:
    try:
        detail = msgspec.json.decode(data, type=_Error).detail
    except msgspec.MsgspecError:
        detail = None
    if code == http.HTTPStatus.NOT_FOUND and detail == "Not Found":  # no such endpoint
        return RunError(f"the coordinator of {name} is of an older version of rljob, which cannot say that", 1)
    return RunError(detail if isinstance(detail, str) else f"the coordinator of {name} answers {code}", 2)
