"""The golden files of the chart: what ten sets of values render. The file of a set has the objects that differ from
those of the default values, and the names of the objects that it lacks.

After an intended change, update the files and read the difference:

    python -m e2e.integration.chart_goldens --update
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from e2e.integration.helm_program import Helm
from rljob.api.yaml_loader import read_yaml
from rljob.manifests.render import to_yaml

HERE = Path(__file__).parent
VALUES, GOLDEN = HERE / "chart_values", HERE / "chart_golden"
DEFAULT = "default"
SETS = sorted(path.stem for path in VALUES.glob("*.yaml"))
GENERATED = "…"
"""In place of certificates, which are random, of the hash of the settings, and of dashboards, which `make verify`
compares."""

Object = dict[str, Any]


def rendered(program: Helm, values: str) -> dict[str, Object]:
    """Return kind/namespace/name → object of a set of values."""
    found = program.template("--values", str(VALUES / f"{values}.yaml"))
    return {_identity(each): _without_generated(each) for each in found}


def text(objects: dict[str, Object], default: dict[str, Object]) -> str:
    """Return the golden file of ``objects``."""
    missing = "".join(f"# without {identity}\n" for identity in default if identity not in objects)
    return missing + to_yaml(each for identity, each in objects.items() if default.get(identity) != each)


def texts(program: Helm) -> dict[str, str]:
    """Return file name → expected content."""
    default = rendered(program, DEFAULT)
    return {f"{name}.yaml": text(rendered(program, name), {} if name == DEFAULT else default) for name in SETS}


def _identity(body: Object) -> str:
    metadata = body["metadata"]
    return "/".join(part for part in (body["kind"], metadata.get("namespace", ""), metadata["name"]) if part)


def _without_generated(body: Object) -> Object:
    if body["kind"] == "Deployment":
        body["spec"]["template"]["metadata"]["annotations"]["rljob.dev/settings"] = GENERATED
    if body["kind"] == "Secret" or "-dashboard-" in body["metadata"]["name"]:
        return body | {"data": dict.fromkeys(body["data"], GENERATED)}
    if body["kind"] == "ValidatingWebhookConfiguration":
        for webhook in body["webhooks"]:
            if "caBundle" in webhook["clientConfig"]:
                webhook["clientConfig"]["caBundle"] = GENERATED
    if body["kind"] == "ConfigMap" and "operator.json" in body["data"]:  # JSON text: as data, a difference is readable
        return body | {"data": {"operator.json": read_yaml(body["data"]["operator.json"])}}
    return body


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    with tempfile.TemporaryDirectory() as home:
        for name, content in texts(Helm(Path(home))).items():
            (GOLDEN / name).write_text(content)
