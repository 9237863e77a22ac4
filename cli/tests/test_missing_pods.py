"""Messages for a component without a pod, and for a pod without usage."""

from __future__ import annotations

from typing import Any

import pytest

from rljob.kube.access import Access
from rljob.local import snapshot_view
from rljob.local.errors import CliError
from rljob.local.process_usage import Usage
from rljob.local.snapshot import ComponentState
from rljob.remote import pod_usage
from rljob.remote.api import Api
from rljob.remote.job import RemoteJob
from rljob.remote.lookup import Namespace
from rljob.remote.missing_pods import roles, why
from rljob.remote.pod_logs import PodLogs

SPEC = {
    "initializer": {"command": ["make"]},
    "rewards": [{"name": "exact", "builtin": "exact_match"}, {"name": "far", "url": "http://far"}],
    "rollouts": [{"name": "main"}],
}


def rljob(*conditions: tuple[str, bool, str, str], **status: Any) -> dict[str, Any]:
    written = [
        {"type": kind, "status": str(holds), "reason": reason, "message": message}
        for kind, holds, reason, message in conditions
    ]
    metadata = {"name": "sums", "namespace": "team-a", "creationTimestamp": "2026-01-31T12:00:00Z"}
    return {"metadata": metadata, "spec": SPEC, "status": {"conditions": written, **status}}


INITIALIZING = ("Ready", False, "Initializing", "the initializer runs")
PENDING = ("Ready", False, "PodsPending", "1 of 2 rollout-main pods pending: insufficient nvidia.com/gpu")
QUOTA = {"name": "trainer", "summary": "1 of 1 trainer pod refused: exceeded quota"}


def test_the_roles_of_a_job_are_those_that_have_pods_of_it() -> None:
    assert roles(rljob()) == ["initializer", "coordinator", "runner", "trainer", "reward-exact", "rollout-main"]


@pytest.mark.parametrize(
    ("body", "component", "there", "said"),
    [
        (rljob(), "trainer", [], "no operator has reconciled it yet; check that the chart rljob is installed"),
        (rljob(INITIALIZING), "trainer", [], "it waits for the initializer; rljob logs -n team-a sums initializer sh"),
        (
            rljob(INITIALIZING),
            "initializer",
            [],
            "the RLJob reports Initializing: the initializer runs; kubectl describe",
        ),
        (
            rljob(PENDING, ("Initialized", True, "Initialized", "the initializer has completed")),
            "initializer",
            ["trainer"],
            "the initializer has completed; rljob status shows what came after",
        ),
        (rljob(PENDING, roles=[QUOTA]), "trainer", [], "trainer: 1 of 1 trainer pod refused: exceeded quota; kubectl "),
        (rljob(PENDING), "rollout", [], "the RLJob reports PodsPending: 1 of 2 rollout-main pods pending"),
        (rljob(PENDING), "rollout", [], "; kubectl describe rlj sums -n team-a tells more"),
        (rljob(("Suspended", True, "Suspended", "")), "trainer", [], "sums is suspended; rljob resume resumes it"),
        (
            rljob(("Complete", True, "Succeeded", "")),
            "trainer",
            ["coordinator"],
            "sums has succeeded and its pods but for coordinator went with their logs; rljob status shows how",
        ),
        (rljob(("Failed", True, "x", "")), "trainer", [], "sums has failed and its pods went with their logs; rljob"),
    ],
)
def test_why_a_component_has_no_pod_and_what_to_look_at(
    body: dict[str, Any], component: str, there: list[str], said: str
) -> None:
    assert said in why(body, component, there)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> RemoteJob:
    monkeypatch.setattr(Namespace, "pods", lambda self, job, role="": [])
    return RemoteJob(Namespace(Api(Access("https://k:1", context="prod")), "team-a"), rljob(INITIALIZING))


def test_a_component_that_has_no_pods_yet_is_no_unknown_one(job: RemoteJob) -> None:
    with pytest.raises(CliError) as caught:
        PodLogs(job, ["rollout"])
    assert caught.value.exit_code == 1
    assert str(caught.value).startswith(
        "there is no pod of rollout of RLJob sums in namespace team-a of context prod: it waits for the initializer"
    )
    with pytest.raises(CliError) as caught:
        PodLogs(job, ["trainr"])
    assert caught.value.exit_code == 2
    assert str(caught.value).endswith(
        "; name one of coordinator, initializer, reward-exact, rollout-main, runner, trainer"
    )
    with pytest.raises(
        CliError, match=r"^RLJob sums in .* has no pods: the RLJob reports Initializing: the initializer"
    ):
        PodLogs(job, [])


def test_a_component_that_is_followed_is_waited_for(job: RemoteJob) -> None:
    logs = PodLogs(job, ["trainer"], follow=True)
    assert logs.components == []
    assert logs.awaited().startswith(
        "waiting for trainer of RLJob sums in namespace team-a of context prod: it waits for the initializer; rljob"
    )
    assert PodLogs(job, [], follow=True).awaited().startswith("waiting for pods of RLJob sums in")
    job.body = rljob(("Complete", True, "Succeeded", ""))
    with pytest.raises(CliError, match="has succeeded and its pods went"):
        PodLogs(job, ["trainer"], follow=True)


POD = ComponentState("trainer-1-0-a", "running", 0, usage=Usage(None, 1.5, 64 << 20))
UNMEASURED = ComponentState("trainer-1-0-a", "running", 0)
NEW, WAITS = ComponentState("runner-b", "running", 0), ComponentState("x", "pending", 0)


@pytest.mark.parametrize(
    ("pods", "note"),
    [
        ([POD], ""),
        ([POD, WAITS], pod_usage.NOT_RUNNING),
        ([POD, NEW, WAITS], pod_usage.NOT_MEASURED),
        ([UNMEASURED], pod_usage.UNKNOWN),
        ([WAITS], pod_usage.NOT_RUNNING),
        ([], pod_usage.NO_PODS),
    ],
)
def test_figures_that_are_missing_are_explained(pods: list[ComponentState], note: str) -> None:
    assert pod_usage.missing(pods) == note


def test_no_cell_of_top_is_empty() -> None:
    table = snapshot_view._usage_table([POD, WAITS])
    assert [[*column.cells] for column in table.columns] == [
        ["trainer-1-0-a", "x"],
        ["running", "pending"],
        ["150", "–"],
        ["64 MiB", "–"],
        ["0", "0"],
    ]
    counted = snapshot_view._usage_table(
        [ComponentState("trainer-1-0-a", "running", 0, usage=Usage(3, 1.5, 1 << 20)), WAITS]
    )
    assert [*counted.columns[4].cells] == ["3", "–"]
