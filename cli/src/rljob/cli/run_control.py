"""Commands that start and end a run: run, apply, stop, resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rljob.api.load import load
from rljob.cli import cluster_commands
from rljob.cli.cluster_commands import Context, Namespace
from rljob.cli.options import File, Overrides, RemoteRunName, RunDir, RunName, default_directory, echo, report
from rljob.local import background, find_run, job_checks
from rljob.local.errors import Interrupted
from rljob.local.local_run import run_job
from rljob.local.run_directory import RunDirectory
from rljob.local.screen import RunOutput, screen_for
from rljob.local.snapshot import RunSnapshot, take_snapshot
from rljob.local.stop import end

if TYPE_CHECKING:
    from rljob.remote.job import RemoteJob


def run(
    file: File,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the run has started; it continues in the background.")
    ] = False,
    no_screen: Annotated[bool, typer.Option("--no-screen", help="Print plain lines, also on a terminal.")] = False,
) -> None:
    """Run a job on this machine, or resume it.

    Ctrl-C writes a checkpoint and stops; a second Ctrl-C stops at once. Nothing is lost in either case.
    """
    job = load(file, overrides or [])
    directory = default_directory(run_dir, job.metadata.name)
    job = job_checks.prepare(job, RunDirectory(directory), report)
    screen = background.start(directory) if detach else screen_for(RunOutput(), live=not no_screen)
    if screen is None:
        echo(f"the run continues in the background, in {directory}")
        echo(f"watch it:  rljob status --watch {directory}   or   rljob logs -f {directory}")
        echo(f"stop it:   rljob stop {directory}")
        return
    try:
        lines = run_job(job, file.read_bytes(), directory, screen)
    except Interrupted as interrupted:
        report(f"{interrupted.checkpoint or 'interrupted'}; the same command resumes the run in {directory}")
        raise typer.Exit(130) from None
    except OSError as error:
        report(f"{directory}: {error.strerror or error}; correct it and run the same command again")
        raise typer.Exit(1) from None
    for line in lines:
        echo(line)


def stop(
    run: RunName = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Stop a run: a checkpoint is written, then all components end. `rljob run` resumes it.

    In a cluster the RLJob is suspended; `rljob resume` resumes it.
    """
    if cluster_commands.targets_cluster(context, namespace):
        _suspend(cluster_commands.find(run, context, namespace), now)
        return
    directory = find_run.find(run)
    if not directory.running():
        echo(f"the run in {directory.path} is not running; it is {take_snapshot(directory).state}")
        return
    end(directory, now)
    snapshot = take_snapshot(directory)
    echo(_stopped_message(snapshot, f"{directory.path}/", "rljob run resumes it"))


def _suspend(job: RemoteJob, now: bool) -> None:
    snapshot = job.snapshot()
    if not snapshot.running:
        echo(f"the {job.place} is not running; it is {snapshot.state}")
        return
    cluster_commands.suspend(job, now, report)
    echo(_stopped_message(job.snapshot(), f"{job.claim()}:", f"{cluster_commands.program()} resume resumes it"))


def _stopped_message(snapshot: RunSnapshot, storage: str, hint: str) -> str:
    """Return the message on a stopped run.

    Args:
        snapshot: of the run.
        storage: prefix of paths in the storage of the run.
        hint: how to resume the run.
    """
    step = f" at step {snapshot.status.progress.step}" if snapshot.status else ""
    checkpoint = snapshot.status.last_checkpoint if snapshot.status else None
    kept = f", checkpoint {storage}{checkpoint.path}" if checkpoint and checkpoint.path else ""
    return f"{snapshot.state}{step}{kept}{'' if snapshot.state == 'succeeded' else f'; {hint}'}"


def resume(run: RemoteRunName = None, context: Context = None, namespace: Namespace = None) -> None:
    """Resume a suspended RLJob."""
    echo(cluster_commands.resume(run, context, namespace))


def apply(
    file: File,
    overrides: Overrides = None,
    context: Context = None,
    namespace: Namespace = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="The API server checks the manifest and changes nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields that another manager has set.")
    ] = False,
) -> None:
    """Create or change the RLJob of a manifest in a cluster.

    Default of the namespace: the manifest's, else the context's.
    """
    job = load(file, overrides or [])
    where, outcome = cluster_commands.apply(job, file, context, namespace, dry_run, force)
    name, tried = job.metadata.name, " (dry run)" if dry_run else ""
    echo(f"the RLJob {name} in namespace {where} is {outcome}{tried}")
    if not dry_run:
        at = f"-n {where} {name}" if context is None else f"--context {context} -n {where} {name}"
        program = cluster_commands.program()
        echo(f"watch it:  {program} status --watch {at}   or   {program} logs -f {at}")
        echo(f"stop it:   {program} stop {at}")
