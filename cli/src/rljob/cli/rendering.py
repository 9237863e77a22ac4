"""Command on what a manifest is in a cluster: render."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rljob import manifests
from rljob.api.errors import ManifestError
from rljob.api.load import load
from rljob.api.yaml_loader import YamlError, read_yaml
from rljob.cli.options import File, Overrides
from rljob.manifests.inputs import Cluster, Context, read_cluster
from rljob.manifests.render import to_yaml


class Form(StrEnum):
    """How objects are written."""

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
            help="The cluster's settings, a YAML file: images, storageClass, … as in the operator's. "
            "Default: those of the chart.",
        ),
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--cpu", help="What `accelerator: {kind: auto}` stands for. Default: as the settings say."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NAME", help="Namespace of the job. Default: the manifest's."),
    ] = None,
    output: Annotated[Form, typer.Option("-o", "--output", help="YAML documents, or a List in JSON.")] = Form.YAML,
) -> None:
    """Print the Kubernetes objects that the operator makes of a manifest.

    All but the Secret of the job's tokens, which are random. Nothing is sent to any cluster.
    """
    job = load(file, overrides or [])
    if found := manifests.problems(job):
        raise ManifestError(found, str(file))
    context = Context(_cluster(cluster, gpu), namespace=namespace or job.metadata.namespace or "default")
    objects = [rendered for role in manifests.render(job, context) for rendered in role.objects]
    if output is Form.JSON:
        whole = {"apiVersion": "v1", "kind": "List", "items": objects}
        typer.echo(json.dumps(whole, ensure_ascii=False, indent=1))
    else:
        typer.echo(to_yaml(objects), nl=False)


def _cluster(path: Path | None, gpu: bool | None) -> Cluster:
    settings = _read(path) if path is not None else {}
    if gpu is not None:
        settings["accelerator"] = "nvidia" if gpu else "cpu"
    try:
        return read_cluster(settings)
    except ValueError as error:
        raise ManifestError(str(error).splitlines(), str(path)) from None


def _read(path: Path) -> dict[str, object]:
    try:
        data = read_yaml(path.read_bytes().decode())
    except FileNotFoundError:
        raise ManifestError(["there is no such file; give the path of the cluster's settings"], str(path)) from None
    except OSError as error:
        raise ManifestError([f"cannot be read: {(error.strerror or str(error)).lower()}"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ManifestError([f"not UTF-8 at byte {error.start}; save it as UTF-8"], str(path)) from None
    except YamlError as error:
        raise ManifestError([str(error)], str(path)) from None
    if not isinstance(data, dict):
        raise ManifestError(["the settings are not a mapping; write for example accelerator: cpu"], str(path))
    return data
