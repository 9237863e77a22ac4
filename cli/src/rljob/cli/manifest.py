"""Commands on a manifest: validate, explain, render."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rljob import manifests
from rljob.api.algorithm_presets import describe_needs
from rljob.api.engine_hosts import describe_hosts
from rljob.api.errors import ManifestError
from rljob.api.explain import explain as expand
from rljob.api.explain import explain_field, manifest_page
from rljob.api.kubernetes import AcceleratorKind
from rljob.api.load import load
from rljob.api.models import RLJob
from rljob.api.resolve import resolve, with_absolute_paths
from rljob.api.yaml_loader import YamlError, read_yaml
from rljob.cli.options import File, Overrides, RunDir, default_directory, echo, echo_json, report
from rljob.local import capacity, job_checks
from rljob.local.gpu_assignment import describe, gpus_of, kind_of
from rljob.local.run_directory import RunDirectory
from rljob.manifests.inputs import Cluster, RenderTarget, read_cluster
from rljob.manifests.render import to_yaml
from rljob.protocol.gpus import find_gpus, nothing_selected


def validate(
    file: File,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    static: Annotated[
        bool,
        typer.Option(
            "--static",
            help="Check the manifest only, not this machine: models, data, rewards, memory, disk, run directory.",
        ),
    ] = False,
) -> None:
    """Check a manifest and this machine, and report every problem."""
    job = load(file, overrides or [])
    if not static:
        job_checks.prepare(job, RunDirectory(default_directory(run_dir, job.metadata.name)), report)
    echo(f"{file}: the RLJob {job.metadata.name} is valid")


def explain(
    file: Annotated[Path | None, typer.Argument(help="The manifest, a YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    field: Annotated[str | None, typer.Option("--field", metavar="PATH", help="Explain one field instead.")] = None,
    docs: Annotated[bool, typer.Option("--docs", help="Print the page on all fields instead.")] = False,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--cpu", help="Meaning of `accelerator: {kind: auto}`. Default: what this machine has."),
    ] = None,
) -> None:
    """Show a manifest with presets and defaults expanded, or explain a field.

    Comments below the manifest show what the algorithm needs computed, the GPUs of this machine that `rljob run`
    assigns, the GPUs of engines that span hosts, and the memory of the trainer.
    """
    if (file is not None) + (field is not None) + docs != 1:
        report("give one of FILE, --field PATH and --docs")
        raise typer.Exit(2)
    if file is not None:
        text = _explained(load(file, overrides or []), gpu)
    else:
        text = explain_field(field) if field is not None else manifest_page()
    echo(text, nl=False)


def _explained(job: RLJob, gpu: bool | None) -> str:
    gpus = find_gpus()
    note = "" if gpus else nothing_selected()
    accelerator: AcceleratorKind = kind_of(gpus) if gpu is None else "nvidia" if gpu else "cpu"
    resolved = with_absolute_paths(resolve(job, accelerator), Path.cwd())
    plan = capacity.memory_plan(resolved, default_directory(None, job.metadata.name), gpus)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # where `rljob run` finds functions of the user's own
    needs = describe_needs(resolved.spec.algorithm)
    hosts = describe_hosts(resolved.spec.rollouts)
    return expand(job, accelerator, filter(None, [*needs, describe(gpus_of(resolved, gpus)), note, *hosts, *plan]))


class Form(StrEnum):
    """Format of the objects."""

    YAML = "yaml"
    JSON = "json"


def render(
    file: File,
    overrides: Overrides = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="<path>",
            help="Settings of the cluster, a YAML file: images, storageClass, … as in the operator's settings. "
            "Default: the settings of the chart.",
        ),
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--cpu", help="Meaning of `accelerator: {kind: auto}`. Default: from the settings."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NAME", help="Namespace of the job. Default: the manifest's."),
    ] = None,
    output: Annotated[Form, typer.Option("-o", "--output", help="YAML documents, or a List in JSON.")] = Form.YAML,
) -> None:
    """Print the Kubernetes objects that the operator creates for a manifest.

    The Secret with the job's random tokens is omitted. Nothing is sent to a cluster.
    """
    job = load(file, overrides or [])
    settings = _cluster(cluster, gpu)
    if found := manifests.problems(job, settings):
        raise ManifestError(found, str(file))
    context = RenderTarget(settings, namespace=namespace or job.metadata.namespace or "default")
    objects = [rendered for role in manifests.render(job, context) for rendered in role.objects]
    if output is Form.JSON:
        whole = {"apiVersion": "v1", "kind": "List", "items": objects}
        echo_json(json.dumps(whole, ensure_ascii=False, indent=1))
    else:
        echo(to_yaml(objects), nl=False)


def _cluster(path: Path | None, gpu: bool | None) -> Cluster:
    settings = read_settings(path) if path is not None else {}
    if gpu is not None:
        settings["accelerator"] = "nvidia" if gpu else "cpu"
    try:
        return read_cluster(settings)
    except ValueError as error:
        raise ManifestError(str(error).splitlines(), str(path)) from None


def read_settings(path: Path) -> dict[str, object]:
    """Return the mapping in a YAML file of settings.

    Raises:
        ManifestError: the file is missing or unreadable, or it is no mapping in YAML.
    """
    try:
        data = read_yaml(path.read_bytes().decode())
    except FileNotFoundError:
        raise ManifestError(["there is no such file; give the path of a YAML file"], str(path)) from None
    except OSError as error:
        raise ManifestError([f"cannot be read: {(error.strerror or str(error)).lower()}"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ManifestError([f"not UTF-8 at byte {error.start}; save it as UTF-8"], str(path)) from None
    except YamlError as error:
        raise ManifestError([str(error)], str(path)) from None
    if not isinstance(data, dict):
        raise ManifestError(["the settings are not a mapping; write one per line, NAME: VALUE"], str(path))
    return data
