"""Explains from an RLJob why a component has no pod, and how to find out more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rljob.api.model_address import is_remote
from rljob.kube.sync_client import Object
from rljob.manifests.names import role_name
from rljob.remote.lookup import COORDINATOR, conditions, holds

INITIALIZER = "initializer"


def not_reconciled_message(name: str = "it") -> str:
    """Return the message on an RLJob without conditions."""
    return f"no operator has reconciled {name} yet; check that the chart rljob is installed and its pod runs"


def roles(body: Object) -> list[str]:
    """Return the roles of an RLJob that ever have pods."""
    spec = body["spec"]
    kinds = {"reward": "rewards", "environment": "environments"}
    services = [
        role_name(kind, each["name"])
        for kind, field in kinds.items()
        for each in spec.get(field) or []
        if not each.get("url")
    ]
    downloads = any(is_remote(model["source"]) for model in spec.get("models") or [])
    return [
        *([INITIALIZER] if spec.get("initializer") or downloads else []),
        *(COORDINATOR, "runner", "trainer"),
        *services,
        *(role_name("rollout", pool["name"]) for pool in spec.get("rollouts") or []),
    ]


def includes(component: str, role: str) -> bool:
    """Return whether ``component``, a role (rollout-main) or a kind of roles (rollout), includes ``role``."""
    return component == role or role.startswith(f"{component}-")


def explain(body: Object, component: str, present: Sequence[str] = ()) -> str:
    """Return why an RLJob has no pod of a component, and how to find out more.

    Args:
        body: the RLJob.
        component: a role, or a kind of roles; empty: the RLJob has no pod at all.
        present: roles that have pods.
    """
    name, namespace = (str(body["metadata"][field]) for field in ("name", "namespace"))
    exception = f" except {', '.join(present)}" if present else ""
    status_conditions = conditions(body)
    for condition, ended in (("Complete", "has succeeded"), ("Failed", "has failed")):
        if holds(body, condition):
            deleted = f"its pods{exception} were deleted with their logs"
            return f"{name} {ended} and {deleted}; rljob status shows how it ended"
    if holds(body, "Suspended"):
        return f"{name} is suspended; rljob resume resumes it"
    if "Ready" not in status_conditions:
        return not_reconciled_message()
    reason, message = (status_conditions["Ready"][field] for field in ("reason", "message"))
    if component == INITIALIZER:
        initialized = status_conditions.get("Initialized", {})
        if initialized.get("status") == "True":
            return f"{initialized['message']}; rljob status shows the state of the run"
    elif component and reason == "Initializing":
        return f"it waits for the initializer; rljob logs -n {namespace} {name} {INITIALIZER} shows its output"
    summaries = [
        f"{role['name']}: {role['summary']}"
        for role in (body.get("status") or {}).get("roles") or []
        if includes(component, str(role["name"])) and role.get("summary")
    ]
    state = f"the RLJob reports {reason}: {message}" if holds(body, "Ready") or not summaries else "; ".join(summaries)
    return f"{state}; kubectl describe rlj {name} -n {namespace} shows more"
