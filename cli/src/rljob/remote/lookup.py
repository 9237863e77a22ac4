"""Finds the RLJob of a command, and its pods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from rljob.kube.resource_kinds import PODS, RLJOBS
from rljob.kube.sync_client import Object
from rljob.local.errors import CliError
from rljob.manifests.names import selector_text
from rljob.remote.api import BAD_REQUEST, FORBIDDEN, Api, ApiRefusedError, connect

MAX_LISTED_NAMES = 8
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DEFAULT = "default"
COORDINATOR = "coordinator"


def conditions(body: Object) -> dict[str, Object]:
    """Return type → condition of an RLJob."""
    return {each["type"]: each for each in (body.get("status") or {}).get("conditions") or []}


def holds(body: Object, condition: str) -> bool:
    """Return whether an RLJob has a condition that is true."""
    return bool(conditions(body).get(condition, {}).get("status") == "True")


def is_active(body: Object) -> bool:
    """Return whether an RLJob is neither finished nor suspended."""
    return not any(holds(body, condition) for condition in ("Complete", "Failed", "Suspended"))


class Namespace:
    """A namespace of a cluster.

    Args:
        api: of the cluster.
        name: of the namespace.
    """

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name

    @property
    def place(self) -> str:
        """Name for messages."""
        return f"namespace {self.name} of {self.api.place}"

    def path(self, job: str = "") -> str:
        """Return the API path of an RLJob; without a name: of all RLJobs of the namespace."""
        return RLJOBS.path(self.name, quote(job, safe=""))

    def find(self, name: str | None) -> Object:
        """Return the RLJob called ``name``. None: the active one, or the newest if none is active.

        Raises:
            CliError: with exit code 2: there is no such RLJob, or several are active and ``name`` is None.
        """
        if name is not None:
            try:
                return self.api.get(self.path(name))
            except ApiRefusedError as error:
                if not error.missing_object:
                    raise
            raise CliError(f"there is no RLJob {name!r} in {self.place}; {self._alternatives()}", 2)
        known = self._all()
        active = [body for body in known if is_active(body)]
        if len(active) > 1:
            raise CliError(
                f"several RLJobs are active in {self.place} ({_joined(_names(active))}); name one of them", 2
            )
        candidates = active or known
        if not candidates:
            raise CliError(f"there is no RLJob in {self.place}; {self._alternatives()}", 2)
        return max(candidates, key=lambda body: str(body["metadata"]["creationTimestamp"]))

    def has(self, name: str) -> bool:
        """Return whether there is an RLJob called ``name``."""
        try:
            return bool(self.api.get(self.path(name)))
        except ApiRefusedError as error:
            if error.missing_object or error.code == BAD_REQUEST:  # not a valid name, for example a path
                return False
            raise

    def pods(self, job: str, role: str = "") -> list[Object]:
        """Return the pods of an RLJob, or of one of its roles, oldest first."""
        found = self.api.get(PODS.path(self.name), labelSelector=selector_text(job, role))["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def _all(self) -> list[Object]:
        found: list[Object] = self.api.get(self.path())["items"]
        return found

    def _alternatives(self) -> str:
        """Return which RLJobs exist, for errors."""
        try:
            known = _names(self._all())
            if not known:
                self.api.get(f"/api/v1/namespaces/{self.name}")
        except ApiRefusedError as error:
            if error.missing_object:
                return "the namespace does not exist; give another with -n"
            if error.code != FORBIDDEN:
                raise
            known = []
        return f"there are {_joined(known)}" if known else "there is none; give another namespace with -n"


def _names(bodies: Sequence[Object]) -> list[str]:
    return sorted(str(body["metadata"]["name"]) for body in bodies)


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED_NAMES]) + (", …" if len(names) > MAX_LISTED_NAMES else "")


def namespace(context: str | None, name: str | None) -> Namespace:
    """Return a namespace of a context. None: the current context, and the namespace of the context.

    Raises:
        CliError: with exit code 2: there is no such context, or it cannot be used.
    """
    api = connect(context)
    if name is not None and not NAME.fullmatch(name):
        raise CliError(f"{name!r} is not a valid name of a namespace; write it like team-a", 2)
    return Namespace(api, name or api.access.namespace or DEFAULT)
