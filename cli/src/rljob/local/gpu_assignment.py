"""Assigns the GPUs of this machine to the trainer and the engines of a job. Pure.

The trainer gets the first GPUs, one per process, then each engine gets its GPUs, in the order of the manifest. A role
whose template sets CUDA_VISIBLE_DEVICES keeps these GPUs; no other role gets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rljob.api.gpu_names import VISIBLE, entries, selection_of
from rljob.api.kubernetes import AcceleratorKind
from rljob.api.models import RLJob
from rljob.protocol.gpus import Gpu, selection_problem, visible

TRAINER = "trainer"


@dataclass(frozen=True)
class GpuDemand:
    """GPUs that the components of one role need.

    ``field``: path of the role. ``number``: field that sets the number of GPUs. ``own``: CUDA_VISIBLE_DEVICES of the
    role's template; None: rljob assigns the GPUs.
    """

    field: str
    what: str
    number: str
    components: tuple[str, ...]
    each: int
    own: str | None

    @property
    def total(self) -> int:
        """GPUs of all components."""
        return self.each * len(self.components)


def kind_of(gpus: Sequence[Gpu]) -> AcceleratorKind:
    """Return the meaning of ``accelerator: {kind: auto}`` on a machine with these GPUs."""
    return "nvidia" if gpus else "cpu"


def demands(job: RLJob) -> list[GpuDemand]:
    """Return the demand of each role of a resolved job that runs on GPUs."""
    trainer, found = job.spec.trainer, []
    if trainer.accelerator.kind == "nvidia":
        own = selection_of(trainer)
        each = trainer.processes_per_node
        found.append(GpuDemand("spec.trainer", "the trainer", "processesPerNode", (TRAINER,), each, own))
    for i, pool in enumerate(job.spec.rollouts):
        if pool.accelerator.kind == "nvidia":
            names = tuple(f"rollout-{pool.name}-{engine}" for engine in range(pool.replicas.min))
            what, own = f"pool {pool.name}", selection_of(pool)
            number = "replicas.min" if pool.devices == 1 else "parallelism"
            found.append(GpuDemand(f"spec.rollouts[{i}]", what, number, names, pool.devices, own))
    return found


def assign(job: RLJob, gpus: Sequence[Gpu]) -> dict[str, tuple[Gpu, ...]]:
    """Return component → its GPUs, for the components to which rljob assigns GPUs.

    Args:
        job: resolved, without :func:`problems`.
        gpus: of this machine.
    """
    wanted = demands(job)
    free = iter(_free(wanted, gpus))
    return {
        component: tuple(gpu for _, gpu in zip(range(demand.each), free, strict=False))
        for demand in wanted
        if demand.own is None
        for component in demand.components
    }


def gpus_of(job: RLJob, gpus: Sequence[Gpu]) -> dict[str, tuple[Gpu, ...]]:
    """Return component → the GPUs that rljob assigns, or that its role's template names, as far as they are known;
    arguments as in :func:`assign`."""
    assigned = assign(job, gpus)
    return {
        component: assigned[component] if demand.own is None else visible(gpus, demand.own)
        for demand in demands(job)
        for component in demand.components
    }


def memory_by_role(job: RLJob, gpus: Sequence[Gpu]) -> tuple[int, int]:
    """Return the smallest memory of the trainer's GPUs and of the engines' GPUs; 0: none, or not known."""
    of_trainer: list[int] = []
    of_engines: list[int] = []
    given = gpus_of(job, gpus)
    for demand in demands(job):
        used = [gpu.memory_bytes for component in demand.components for gpu in given[component][: demand.each]]
        (of_trainer if TRAINER in demand.components else of_engines).extend(used)
    return min(of_trainer, default=0), min(of_engines, default=0)


def problems(job: RLJob, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield a sentence if the machine has too few GPUs for a resolved job."""
    wanted = demands(job)
    if wanted and not gpus:
        for demand in wanted:
            yield f"{demand.field}.accelerator.kind: this machine has no NVIDIA GPU; set auto (use what exists) or cpu"
        return
    for demand in wanted:
        if demand.own is None:
            continue
        if wrong := selection_problem(gpus, demand.own):
            yield f"{demand.field}.template: {VISIBLE} names {wrong}; name each GPU that it needs once, or remove it"
        elif (named := len(entries(demand.own))) < demand.each:
            yield (
                f"{demand.field}.template: {VISIBLE} names {_count(named)} and {demand.what} needs {demand.each}; name "
                "more, or remove it"
            )
    mine = [demand for demand in wanted if demand.own is None]
    needed, free = sum(demand.total for demand in mine), len(_free(wanted, gpus))
    if needed > free:
        fields = ", ".join(f"{demand.field}.{demand.number}" for demand in mine)
        parts = ", ".join(f"{demand.total} for {demand.what}{_product(demand)}" for demand in mine)
        kept = f" besides those that templates name in {VISIBLE}" if len(mine) < len(wanted) else ""
        yield (
            f"{fields}: the job needs {_count(needed)} ({parts}) and this machine has {free}{kept}; lower one of them, "
            f"make more GPUs visible ({VISIBLE}), or set accelerator.kind: cpu for a role"
        )


def describe(assignment: dict[str, tuple[Gpu, ...]]) -> str:
    """Return an assignment as one line; empty without GPUs."""
    parts = [f"{name} {','.join(gpu.visible_as for gpu in gpus)}" for name, gpus in assignment.items() if gpus]
    models = sorted({gpu.name for gpus in assignment.values() for gpu in gpus if gpu.name})
    known = f" ({', '.join(models)})" if models else ""
    return f"GPUs: {'; '.join(parts)}{known}" if parts else ""


def _free(wanted: Sequence[GpuDemand], gpus: Sequence[Gpu]) -> list[Gpu]:
    named = {gpu.key for demand in wanted if demand.own is not None for gpu in visible(gpus, demand.own)}
    return [gpu for gpu in gpus if gpu.key not in named]


def _product(demand: GpuDemand) -> str:
    engines = len(demand.components)
    return f" ({engines} engines of {demand.each})" if demand.each > 1 and engines > 1 else ""


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
