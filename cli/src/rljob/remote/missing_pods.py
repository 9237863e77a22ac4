"""Explains why a job in a cluster has no pod of a component, and what to look at. Pure: from an RLJob that was read."""

from __future__ import annotations

from collections.abc import Sequence

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
    rewards = [each["name"] for each in spec.get("rewards") or [] if not each.get("url")]
    return [
        *([INITIALIZER] if spec.get("initializer") else []),
        *(COORDINATOR, "runner", "trainer"),
        *(role_name("reward", name) for name in rewards),
        *(role_name("rollout", pool["name"]) for pool in spec.get("rollouts") or []),
    ]


def is_of(component: str, role: str) -> bool:
    """Return whether ``component``, a role (rollout-main) or a kind of roles (rollout), includes ``role``."""
    return component == role or role.startswith(f"{component}-")


def why(body: Object, component: str, there: Sequence[str] = ()) -> str:
    """Return why an RLJob has no pod of a component, and what to look at.

    Args:
        body: the RLJob.
        component: one of its roles, or a kind of them; empty: it has no pod at all.
        there: roles that have pods.
    """
    name, namespace = (str(body["metadata"][field]) for field in ("name", "namespace"))
    but = f" but for {', '.join(there)}" if there else ""
    met = conditions(body)
    for condition, ended in (("Complete", "has succeeded"), ("Failed", "has failed")):
        if holds(body, condition):
            return f"{name} {ended} and its pods{but} went with their logs; rljob status shows how it ended"
    if holds(body, "Suspended"):
        return f"{name} is suspended; rljob resume resumes it"
    if "Ready" not in met:
        return not_reconciled_message()
    reason, message = met["Ready"]["reason"], met["Ready"]["message"]
    if component == INITIALIZER:
        initialized = met.get("Initialized", {})
        if initialized.get("status") == "True":
            return f"{initialized['message']}; rljob status shows what came after"
    elif component and reason == "Initializing":
        return f"it waits for the initializer; rljob logs -n {namespace} {name} {INITIALIZER} shows what that does"
    summaries = [
        f"{role['name']}: {role['summary']}"
        for role in (body.get("status") or {}).get("roles") or []
        if is_of(component, str(role["name"])) and role.get("summary")
    ]
    state = f"the RLJob reports {reason}: {message}" if holds(body, "Ready") or not summaries else "; ".join(summaries)
    return f"{state}; kubectl describe rlj {name} -n {namespace} tells more"
