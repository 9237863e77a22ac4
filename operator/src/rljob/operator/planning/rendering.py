"""Rendering, remembered: at rest a job is decided on again and again with the same rendering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rljob import manifests
from rljob.api.models import RLJob
from rljob.manifests.inputs import Context
from rljob.manifests.render_context import RenderedRole

Render: TypeAlias = Callable[[RLJob, Context], Sequence[RenderedRole]]
"""Job and context → its roles with their objects; ValueError when the job cannot be rendered."""


def render(job: RLJob, context: Context) -> Sequence[RenderedRole]:
    """Return the roles of a job.

    Raises:
        ValueError: it says what no cluster can honour; each line is a sentence.
    """
    problems = manifests.problems(job)
    if problems:
        raise ValueError("\n".join(problems))
    return manifests.render(job, context)


@dataclass(frozen=True)
class _Entry:
    job: RLJob
    context: Context
    roles: Sequence[RenderedRole]


class Rendering:
    """Remembers the last rendering of each job, for as long as job (the very object) and context are the same."""

    def __init__(self, render: Render = render) -> None:
        self._render = render
        self._entries: dict[str, _Entry] = {}

    def __call__(self, job: RLJob, context: Context) -> Sequence[RenderedRole]:
        """Return the roles of ``job``; they are shared and must not be changed."""
        entry = self._entries.get(context.uid)
        if entry is None or entry.job is not job or entry.context != context:
            entry = self._entries[context.uid] = _Entry(job, context, self._render(job, context))
        return entry.roles

    def forget(self, uid: str) -> None:
        """Forget a job that is gone."""
        self._entries.pop(uid, None)
