"""Queries the coordinator of an RLJob, or explains why it is not available."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from rljob.api.pod_models import READERS_PORT
from rljob.kube.sync_client import Object
from rljob.local.errors import CliError
from rljob.manifests.names import claim_name, ledger_claim_name
from rljob.protocol.run_status import NOTE_HEADER, RunStatus, decode_note, status_from
from rljob.remote import port_forward
from rljob.remote.api import FORBIDDEN, UNAUTHORIZED, ApiRefusedError
from rljob.remote.lookup import COORDINATOR, Namespace, conditions, holds, is_active
from rljob.remote.missing_pods import not_reconciled_message

T = TypeVar("T")


class CoordinatorUnavailableError(CliError):
    """The coordinator is not available; the sentence has the reason."""


class _Error(msgspec.Struct):
    error: str = ""
    detail: Any = None


class CoordinatorApi:
    """The coordinator of an RLJob.

    Args:
        namespace: of the job.
        body: the RLJob.
        patience: longest time without a byte of an answer, in seconds.
    """

    def __init__(self, namespace: Namespace, body: Object, patience: float = port_forward.SILENCE_SECONDS) -> None:
        self._namespace, self._body, self._patience = namespace, body, patience
        self._name = str(body["metadata"]["name"])

    def ask(self, path: str, kind: type[T], /, **query: Any) -> tuple[T, str]:
        """Return the answer, and its note.

        Raises:
            CoordinatorUnavailableError: the coordinator does not run or does not answer.
            CliError: with exit code 2: the requested object does not exist, or port forwarding is not allowed.
        """
        with self.open(path, **query) as answer:
            data = _read_all(answer)
            note = decode_note(answer.getheader(NOTE_HEADER) or "")
        try:
            return msgspec.json.decode(data, type=kind), note
        except msgspec.ValidationError:
            with contextlib.suppress(msgspec.MsgspecError):
                if sentence := msgspec.json.decode(data, type=_Error).error:
                    raise CliError(sentence, 2) from None
            raise self._other_version() from None
        except msgspec.DecodeError:
            raise CoordinatorUnavailableError(
                f"the coordinator of {self._name} closed the connection in the middle of its answer; try again"
            ) from None

    def status(self) -> RunStatus:
        """Return the status of the run. Raises as :meth:`ask`."""
        data, _ = self.ask("/v1/status", dict[str, Any])
        try:
            return status_from(data)
        except ValueError:
            raise self._other_version() from None

    def _other_version(self) -> CliError:
        return CliError(
            f"the coordinator of {self._name} is of another version of rljob; use the command line of that version"
        )

    @contextlib.contextmanager
    def open(self, path: str, /, **query: Any) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a GET. Raises as :meth:`ask`."""
        parameters = {name: value for name, value in query.items() if value is not None}
        target = f"{quote(path)}?{urlencode(parameters)}" if parameters else quote(path)
        pod = self._pod()
        try:
            answer = port_forward.get(
                self._namespace.api, self._namespace.name, pod["metadata"]["name"], READERS_PORT, target, self._patience
            )
        except port_forward.HandshakeError as error:  # this does not depend on the coordinator
            raise CoordinatorUnavailableError(error.sentence) from None
        except port_forward.ForwardError as error:
            raise self._unavailable(error) from None
        except ApiRefusedError as error:
            if error.code in (UNAUTHORIZED, FORBIDDEN):
                raise
            raise self._unavailable(error) from None
        with answer:
            try:
                if answer.status >= http.HTTPStatus.BAD_REQUEST:
                    raise _refused(self._name, answer.status, _read_all(answer))
                yield answer
            except port_forward.ForwardError as error:  # in the middle of the answer
                raise self._unavailable(error) from None

    def _pod(self) -> Object:
        pods = self._namespace.pods(self._name, COORDINATOR)
        if running := [pod for pod in pods if _phase(pod) == "Running"]:
            return running[-1]
        # A run may end before the node reports that the pod runs; and a lost pod of a finished job is replaced.
        if not is_active(self._body) and _remaining(pods):
            raise CoordinatorUnavailableError(f"the coordinator of {self._name} is starting; try again")
        raise CoordinatorUnavailableError(self.unavailable_reason())

    def _unavailable(self, error: CliError) -> CoordinatorUnavailableError:
        """Return the error of a failed request; for an active job it contains the cause."""
        if is_active(self._body):
            return CoordinatorUnavailableError(f"{self.unavailable_reason()} ({error.sentence})")
        # The pod of a finished job may have ended; while it runs, its data is available.
        if _remaining(self._namespace.pods(self._name, COORDINATOR)):
            return CoordinatorUnavailableError(
                f"the coordinator of {self._name} does not answer: {error.sentence}; try again"
            )
        return CoordinatorUnavailableError(self.unavailable_reason())

    def unavailable_reason(self) -> str:
        """Return why the coordinator is not available and which commands work without it, from the RLJob."""
        name, status_conditions = self._name, conditions(self._body)
        storage = f"{self._kept}, and rljob status shows how it ended"
        for condition, ended in (("Complete", "has succeeded"), ("Failed", "has failed")):
            if holds(self._body, condition):
                return f"{name} {ended} and its coordinator has gone (spec.keepCoordinatorSeconds); {storage}"
        if holds(self._body, "Suspended"):
            return f"{name} is suspended and has no pods; rljob resume resumes it, and {self._kept}"
        if "Ready" not in status_conditions:
            return not_reconciled_message(name)
        ready = status_conditions["Ready"]
        return f"the coordinator of {name} does not answer; the RLJob reports {ready['reason']}: {ready['message']}"

    @property
    def claim(self) -> str:
        """Name of the claim of the job's storage."""
        return claim_name(self._name, self._storage.get("claim"))

    @property
    def _storage(self) -> Object:
        found: Object = self._body["spec"].get("storage") or {}
        return found

    @property
    def _kept(self) -> str:
        """Which claims keep the run; a part of a sentence."""
        if self._storage.get("ledger") is None:
            return f"its claim {self.claim} keeps ledger and checkpoints"
        return f"its claims {ledger_claim_name(self._name)} and {self.claim} keep ledger and checkpoints"


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _remaining(pods: list[Object]) -> list[Object]:
    """The pods that run or will run."""
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and _phase(pod) in ("Running", "Pending")]


def _read_all(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read()
    except http.client.HTTPException as error:
        raise CoordinatorUnavailableError(
            f"the coordinator closed the connection in the middle of its answer: {error}; try again"
        ) from None


def _refused(name: str, code: int, data: bytes) -> CliError:
    try:
        detail = msgspec.json.decode(data, type=_Error).detail
    except msgspec.MsgspecError:
        detail = None
    if code == http.HTTPStatus.NOT_FOUND and detail == "Not Found":  # no such endpoint
        return CliError(f"the coordinator of {name} runs an older version of rljob without this endpoint", 1)
    return CliError(detail if isinstance(detail, str) else f"the coordinator of {name} answers {code}", 2)
