"""What a cluster makes of a job: its objects, and what the operator does with it from creation to deletion."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob.api.models import RLJob
from rljob.manifests import render
from rljob.manifests.inputs import RenderTarget

WORLD = Path(__file__).parents[2] / "operator" / "tests" / "world.py"


HASHES = ("rljob.dev/role-hash", "rljob.dev/rendered-hash")
"""Annotations that follow from the whole spec; a field that changes only these has no effect."""


def rendered(job: RLJob) -> list[Any]:
    """Return the objects of a job, without hashes."""
    return [_without_hashes(body) for role in render(job, RenderTarget(uid="uid")) for body in role.objects]


def _without_hashes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_hashes(inner) for key, inner in value.items() if key not in HASHES}
    return [_without_hashes(inner) for inner in value] if isinstance(value, list) else value


def decisions(job: RLJob) -> list[Any]:
    """Return what the operator decides about a job from its creation to its deletion."""
    return list(_life(job))


def _life(job: RLJob) -> Iterator[Any]:
    """Yield what the operator decides: while no node has room, while the job runs, when its trainer dies twice, at its
    end and long after; and when it is suspended instead."""
    world = _world().World(**_spec(job))
    yield _decided(world)
    if not world.find() and not world.names("Job"):
        return  # it is none of ours, or suspended
    world.finish_initializer()
    world.settle()
    world.make_pods()
    world.unschedulable("insufficient cpu")
    world.now += 90
    yield _decided(world)
    world.ready()
    world.tell(state="Running")
    yield _decided(world)
    for _ in range(2):
        if any("trainer" in name for name in world.names("Job")):
            world.fail_job()
        world.settle()
        world.now += 90
        world.settle()
        yield _decided(world)
    world.tell(state="Succeeded")
    world.settle()
    world.now += 90
    yield _decided(world)
    yield from _suspension(job)


def _suspension(job: RLJob) -> Iterator[Any]:
    world = _world().World(**_spec(job))
    world.run_up()
    world.change(suspend=True)
    world.settle()
    world.now += 90
    world.settle()
    yield world.names("StatefulSet")


def _decided(world: Any) -> Any:
    """Have the operator decide, and do it; return what can be seen of it."""
    made = world.plan()
    if made.status is None:
        return None
    conditions = [(each.type, each.status, each.reason) for each in made.status.conditions]
    objects = [(each["kind"], each["metadata"]["name"]) for each in made.desired]
    return objects, made.deletions, made.delete_job, made.after, conditions, made.status.trainer


def _spec(job: RLJob) -> dict[str, Any]:
    spec: dict[str, Any] = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return spec


def _world() -> ModuleType:
    """Return operator/tests/world.py: by its path, as `operator` is the standard library's."""
    name = "rljob_planning_world"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, WORLD)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
