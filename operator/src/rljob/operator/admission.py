"""Admission of RLJobs: what the operator would report as InvalidSpec is refused when the RLJob is written. Pure.

The API server checks the schema and its rules itself. This module adds the checks that CEL cannot express and those of
fields that have no effect in a cluster, with the sentences of the condition. It is called by every operator, leader or
not, and reads nothing but the two objects and the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob import manifests
from rljob.manifests.inputs import Cluster
from rljob.operator.decoded_jobs import manifest_of

Object = Mapping[str, Any]
"""An RLJob as JSON."""


def new_problems(new: Object, old: Object | None, cluster: Cluster | None = None) -> Sequence[str]:
    """Return the problems for which an RLJob is refused.

    An update is refused only for problems that the stored RLJob does not have. Otherwise a job that a newer operator
    reads as invalid could get neither a label nor `suspend: true`, and its finalizers could not be removed.

    Args:
        new: the RLJob that is to be stored.
        old: the stored RLJob; None if it is created.
        cluster: settings of the cluster; None: its accelerator profiles are not known.
    """
    found = _problems(new, cluster)
    if not found or old is None:
        return found
    known = set(_problems(old, cluster))
    return [problem for problem in found if problem not in known]


def _problems(job: Object, cluster: Cluster | None) -> Sequence[str]:
    """Return what the operator reports as InvalidSpec; nothing for an RLJob that another controller manages."""
    manifest = manifest_of(str(job["metadata"].get("name", "")), job.get("spec"))
    if manifest.managed:
        return ()
    return manifest.problems if manifest.job is None else manifests.problems(manifest.job, cluster)
