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
from rljob.remote.missing_pods import explain, roles
from rljob.remote.pod_logs import PodLogs

SPEC = {
    "initializer": {"command": ["make"]},
    "rewards": [{"name": "exact", "builtin": "exact_match"}, {"name": "far", "url": "http://far"}],
    "environments": [{"name": "lake", "builtin": "frozen_lake"}, {"name": "away", "url": "http://away"}],
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


def test_roles_are_those_that_have_pods() -> None:
    always = ["initializer", "coordinator", "runner", "trainer"]
    assert roles(rljob()) == [*always, "reward-exact", "environment-lake", "rollout-main"]


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
            "the initializer has completed; rljob status shows the state of the run",
        ),
        (rljob(PENDING, roles=[QUOTA]), "trainer", [], "trainer: 1 of 1 trainer pod refused: exceeded quota; kubectl "),
        (rljob(PENDING), "rollout", [], "the RLJob reports PodsPending: 1 of 2 rollout-main pods pending"),
        (rljob(PENDING), "rollout", [], "; kubectl describe rlj sums -n team-a shows more"),
        (rljob(("Suspended", True, "Suspended", "")), "trainer", [], "sums is suspended; rljob resume resumes it"),
        (
            rljob(("Complete", True, "Succeeded", "")),
            "trainer",
            ["coordinator"],
            "sums has succeeded and its pods except coordinator were deleted with their logs; rljob status shows how",
        ),
        (
            rljob(("Failed", True, "x", "")),
            "trainer",
            [],
            "sums has failed and its pods were deleted with their logs; rljob",
        ),
    ],
)
def test_the_cause_of_a_missing_pod_is_explained(
    body: dict[str, Any], component: str, there: list[str], said: str
) -> None:
    assert said in explain(body, component, there)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> RemoteJob:
    monkeypatch.setattr(Namespace, "pods", lambda self, job, role="": [])
    return RemoteJob(Namespace(Api(Access("https://k:1", context="prod")), "team-a"), rljob(INITIALIZING))


def test_a_component_without_pods_is_not_reported_as_unknown(job: RemoteJob) -> None:
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
        "; name one of coordinator, environment-lake, initializer, reward-exact, rollout-main, runner, trainer"
    )
    with pytest.raises(
        CliError, match=r"^RLJob sums in .* has no pods: the RLJob reports Initializing: the initializer"
    ):
        PodLogs(job, [])


def test_following_waits_for_a_component_without_pods(job: RemoteJob) -> None:
    logs = PodLogs(job, ["trainer"], follow=True)
    assert logs.components == []
    assert logs.waiting_message().startswith(
        "waiting for trainer of RLJob sums in namespace team-a of context prod: it waits for the initializer; rljob"
    )
    assert PodLogs(job, [], follow=True).waiting_message().startswith("waiting for pods of RLJob sums in")
    job.body = rljob(("Complete", True, "Succeeded", ""))
    with pytest.raises(CliError, match="has succeeded and its pods were"):
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
def test_missing_usage_is_explained(pods: list[ComponentState], note: str) -> None:
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
