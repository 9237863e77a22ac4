"""A run is backed up, deleted with its claim, restored as docs/operations/backup.md shows it, and continues."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.docs.blocks import blocks
from e2e.pods.full.test_many_deaths import small
from e2e.pods.job import RESTRICTED, Job
from tools.cluster.node import Cluster

PAGE = Path(__file__).parents[3] / "docs/operations/backup.md"
SECONDS = 400.0
CLAIM = "quickstart-storage"

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    name = node.namespace("backup", RESTRICTED)
    yield Job(node, name, small())
    node.api.delete(f"/api/v1/namespaces/{name}")


def run_page_job(job: Job, file: str, image: str) -> None:
    """Apply a file of the page, with an image of this cluster, and wait for its Job."""
    [text] = [block.text for block in blocks(PAGE) if block.file == file]
    text = text.replace("image: rljob-coordinator:0.1.0", f"image: {image}\n        imagePullPolicy: IfNotPresent")
    job.kubectl("apply", "-f", "-", stdin=text)
    name = f"job/quickstart-{file.removesuffix('.yaml')}"
    job.kubectl("wait", name, "--for=condition=Complete", "--timeout=120s")
    job.kubectl("delete", name, "--wait")


def rendered_claims(job: Job, directory: Path) -> str:
    """Return what `rljob render` prints for the job, with the settings of the chart."""
    config = job.node.api.get("/api/v1/namespaces/rljob-system/configmaps/rljob-operator")
    settings, manifest = directory / "settings.json", directory / "job.json"
    settings.write_text(json.dumps(json.loads(config["data"]["operator.json"])["cluster"]))
    manifest.write_text(json.dumps(job.body))
    command = ["render", str(manifest), "-n", job.namespace, "--cluster", str(settings)]
    done = subprocess.run([sys.executable, "-m", "rljob.cli.main", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_restored_run_continues_and_its_audit_is_clean(job: Job, installed: Any, tmp_path: Path) -> None:
    image = installed.images["coordinator"]
    job.apply()
    job.reaches(7, SECONDS)
    job.change(suspend=True, suspendGraceSeconds=60)
    job.has_reason("Suspended", "Suspended", SECONDS)
    done = int(job.status()["run"]["progress"]["step"])
    run_page_job(job, "backup.yaml", image)
    job.delete()
    job.kubectl("wait", f"rljob/{job.name}", "--for=delete", "--timeout=60s")
    job.kubectl("delete", "pvc", CLAIM, "--wait", "--timeout=120s")

    job.kubectl("apply", "-l", "rljob.dev/role=storage", "-f", "-", stdin=rendered_claims(job, tmp_path))
    run_page_job(job, "restore.yaml", image)
    job.apply()
    assert job.reaches(done + 2, SECONDS) >= done + 2
    report = job.audit()
    assert report["ok"], report
    log = job.kubectl("logs", f"{job.name}-coordinator-0")
    versions = [int(found) for found in re.findall(r"ledger: version (\d+)", log)]
    assert versions and versions[0] >= done, "the coordinator began with the restored ledger"
