"""A claim that an earlier job of this name left behind is taken over by the same job only, never by another one; the
claim of a job that ran is never replaced by an empty one.

That is decided before a job begins. Once it has, its claim is its own, whatever the annotation says: another version of
rljob may compute the hash of the same manifest otherwise, and a job that runs is left alone by an upgrade.
"""

from __future__ import annotations

from rljob.manifests.names import JOB, SPEC_HASH
from rljob.operator.plan import Ref
from rljob.operator.planning.scene import Scene

CLAIM = "PersistentVolumeClaim"


def lost(scene: Scene) -> dict[Ref, str]:
    """Return the job's claims that held its run and are not to be seen any more, each with a sentence.

    An empty one in their place would lose the run in silence. They may have lost a label only, so the job waits.
    """
    status, children = scene.observed.status, scene.observed.children
    if status.run is None and (status.trainer is None or not status.trainer.job_uid):
        return {}  # it may never have been made
    return {
        ref: f"claim {ref[1]}, which holds the run, is not to be seen: put its label {JOB} back, or make the job anew "
        "if the claim was deleted"
        for ref in _rendered(scene)
        if ref not in children
    }


def going(scene: Scene) -> dict[Ref, str]:
    """Return the job's claims that are being deleted, each with a sentence."""
    children = scene.observed.children
    return {
        ref: f"claim {ref[1]} is being deleted and goes with the last pod that uses it: save what you need of it"
        for ref in _rendered(scene)
        if ref in children and children[ref].metadata.deletion_timestamp is not None
    }


def of_another_run(scene: Scene) -> dict[Ref, str]:
    """Return the job's claims that hold the run of a job with another manifest, each with a sentence."""
    name, children = scene.observed.metadata.name, scene.observed.children
    return {
        ref: f"claim {ref[1]} holds the run of an earlier RLJob {name} with another manifest; give this job another "
        "name, or delete the claim if nobody needs its models any more"
        for ref, spec_hash in _rendered(scene).items()
        if ref in children and children[ref].metadata.annotations.get(SPEC_HASH) != spec_hash
    }


def _rendered(scene: Scene) -> dict[Ref, str]:
    """Return the claims that the job makes, with the hash of its immutable fields."""
    objects = (each for role in scene.roles for each in role.objects if each["kind"] == CLAIM)
    return {(CLAIM, each["metadata"]["name"]): each["metadata"]["annotations"][SPEC_HASH] for each in objects}
