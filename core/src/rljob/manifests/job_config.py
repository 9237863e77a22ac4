"""job.json: the manifest as a job's parts read it."""

from __future__ import annotations

from typing import Any

import msgspec

from rljob.api.models import RLJob
from rljob.manifests.hashes import Inputs

KEY = "job.json"
"""In the ConfigMap, and name of the file in a pod."""


def job_json(job: RLJob, inputs: Inputs) -> str:
    """Return the user's fields, not expanded, without those that only the operator reads.

    Parts expand it by themselves (:func:`rljob.api.resolve.resolve`), and defaults are left out: so a part of an older
    release never meets a field that its operator's newer one has filled in.
    """
    content: dict[str, Any] = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": job.metadata.name},
        "spec": inputs.parts,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode()
