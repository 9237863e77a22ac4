"""The effect of a job in a cluster: its objects, and the operator's decisions from its creation to its deletion."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob.api.models import RLJob
from rljob.manifests import render
from rljob.manifests.accelerator_profiles import AcceleratorProfile
from rljob.manifests.inputs import Cluster, RenderTarget

WORLD = Path(__file__).parents[2] / "operator" / "tests" / "world.py"


HASHES = ("rljob.dev/role-hash", "rljob.dev/rendered-hash")
"""Annotations that follow from the whole spec; a field that changes only these has no effect."""
CLUSTER = Cluster(accelerator_profiles={"h100": AcceleratorProfile(node_selector={"accelerator": "h100"})})


def rendered(job: RLJob) -> list[Any]:
    """Return the objects of a job, without hashes."""
    target = RenderTarget(uid="uid", cluster=CLUSTER)
    return [_without_hashes(body) for role in render(job, target) for body in role.objects]


def _without_hashes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_hashes(inner) for key, inner in value.items() if key not in HASHES}
    return [_without_hashes(inner) for inner in value] if isinstance(value, list) else value


def decisions(job: RLJob) -> list[Any]:
    """Return what the operator decides about a job from its creation to its deletion."""
    return list(_lifecycle(job))


def _lifecycle(job: RLJob) -> Iterator[Any]:
    """Yield the operator's decisions: while no node has room, while the job runs, after two crashes of its trainer,
    after its end, and for a suspension instead."""
    world = _world().World(**_spec(job))
    yield _visible_plan(world)
    if not world.find() and not world.names("Job"):
        return  # another controller manages the job, or it is suspended
    world.finish_initializer()
    world.settle()
    world.make_pods()
    world.unschedulable("insufficient cpu")
    world.now += 90
    yield _visible_plan(world)
    world.ready()
    world.tell(state="Running")
    yield _visible_plan(world)
    for _ in range(2):
        if any("trainer" in name for name in world.names("Job")):
            world.exit("trainer-", 1)
            world.fail_job()
        world.settle()
        world.now += 90
        world.settle()
        yield _visible_plan(world)
    world.tell(state="Succeeded")
    world.settle()
    world.now += 90
    yield _visible_plan(world)
    yield from _suspension(job)


def _suspension(job: RLJob) -> Iterator[Any]:
    world = _world().World(**_spec(job))
    world.run_up()
    world.change(suspend=True)
    world.settle()
    world.now += 90
    world.settle()
    yield world.names("StatefulSet")


def _visible_plan(world: Any) -> Any:
    """Let the operator make and execute a plan; return its visible effects."""
    plan = world.plan()
    if plan.status is None:
        return None
    conditions = [(each.type, each.status, each.reason) for each in plan.status.conditions]
    objects = [(each["kind"], each["metadata"]["name"]) for each in plan.desired]
    return objects, plan.deletions, plan.delete_job, plan.after, conditions, plan.status.trainer


def _spec(job: RLJob) -> dict[str, Any]:
    spec: dict[str, Any] = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return spec


def _world() -> ModuleType:
    """Return operator/tests/world.py, loaded by its path: the name `operator` belongs to the standard library."""
    name = "rljob_planning_world"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, WORLD)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
