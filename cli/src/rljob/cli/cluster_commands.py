"""Commands on a job in a cluster: whether a command targets one, and the calls to ``rljob.remote``.

A run is an RLJob if ``--context`` or ``-n`` is given, and always as ``kubectl rljob``. ``rljob.remote`` is imported
when it is needed: commands on local runs start without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rljob.api.models import RLJob
from rljob.local import find_run
from rljob.local.errors import CliError
from rljob.local.snapshot import RunSnapshot

if TYPE_CHECKING:
    from rljob.remote.job import RemoteJob
    from rljob.remote.pod_logs import PodLogs

PLUGIN = "kubectl rljob"
Context = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="NAME", help="Context of the kubeconfig: RUN is an RLJob there.", show_default=False
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--namespace",
        metavar="NAME",
        help="Namespace: RUN is an RLJob there, in the current context if no other is given.",
        show_default=False,
    ),
]
_program = ["rljob"]


def set_plugin_mode() -> None:
    """Treat every run as an RLJob: this process runs as the kubectl plugin."""
    _program[0] = PLUGIN


def program() -> str:
    """Return the name of this program."""
    return _program[0]


def is_plugin() -> bool:
    """Return whether this program runs as `kubectl rljob`."""
    return program() == PLUGIN


def targets_cluster(context: str | None, namespace: str | None) -> bool:
    """Return whether a run is an RLJob in a cluster."""
    for option, given in (("--context", context), ("--namespace", namespace)):
        if given == "":
            raise CliError(f"{option} is empty; give a name, or leave it out", 2)
    return is_plugin() or context is not None or namespace is not None


def find(run: str | None, context: str | None, namespace: str | None) -> RemoteJob:
    """Return the named RLJob; raises as :func:`rljob.remote.job.find`."""
    from rljob.remote import job

    return job.find(run, context, namespace)


def find_among(names: Sequence[str], context: str | None, namespace: str | None) -> tuple[RemoteJob, list[str]]:
    """Return the named RLJob and the other names; raises as :func:`rljob.remote.job.find_among`."""
    from rljob.remote import job

    return job.find_among(names, context, namespace)


def logs(job: RemoteJob, components: Sequence[str], *, named: bool, follow: bool) -> PodLogs:
    """Return a reader for the logs of a job's components; arguments as :class:`rljob.remote.pod_logs.PodLogs`."""
    from rljob.remote.pod_logs import PodLogs

    return PodLogs(job, components, named=named, follow=follow)


def usage_source(job: RemoteJob) -> Callable[[], RunSnapshot]:
    """Return a function that takes snapshots of a job's pods and their usage."""
    from rljob.remote.pod_usage import PodUsageMeter

    return PodUsageMeter(job).snapshot


def suspend(job: RemoteJob, now: bool, report: Callable[[str], None]) -> None:
    """Suspend a job; as :func:`rljob.remote.apply.suspend`."""
    from rljob.remote import apply

    apply.suspend(job, now, report)


def export(job: RemoteJob, destination: Path, step: int | None) -> int:
    """Fetch the model of a checkpoint; as :func:`rljob.remote.export.export`."""
    from rljob.remote import export

    return export.export(job, destination, step)


def resume(run: str | None, context: str | None, namespace: str | None) -> str:
    """Resume a suspended job; return a message.

    Raises:
        CliError: with exit code 2: ``run`` is a run of this machine, or no cluster is configured; and as
            :func:`rljob.remote.job.find`.
    """
    from rljob.kube.kubeconfig import configured
    from rljob.remote import apply, job

    if not targets_cluster(context, namespace) and (not configured() or (run is not None and find_run.exists(run))):
        raise CliError(
            "rljob resume resumes a job in a cluster: give -n or --context; `rljob run FILE` resumes a run of this "
            "machine",
            2,
        )
    found = job.find(run, context, namespace)
    if not found.body["spec"].get("suspend"):
        return f"the {found.place} is not suspended"
    apply.resume(found)
    return f"the {found.place} is resumed"


def apply(
    job: RLJob, source: Path, context: str | None, namespace: str | None, dry_run: bool, force: bool
) -> tuple[str, str]:
    """Apply a manifest; return the namespace and the outcome, as :func:`rljob.remote.apply.apply`."""
    from rljob.remote import apply, lookup

    own = job.metadata.namespace
    if own is not None and namespace is not None and own != namespace:
        raise CliError(
            f"{source}: metadata.namespace: {own} in the manifest, but -n is {namespace}; omit one of them", 2
        )
    where = lookup.namespace(context, namespace or own)
    return where.name, apply.apply(where, job, str(source), dry_run=dry_run, force=force)
