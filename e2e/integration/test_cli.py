"""The command line against a real API server: rights, missing objects, and apply. No pod runs here."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob.cli.main import main, plugin
from tools.cluster.client import Object
from tools.cluster.controlplane import ControlPlane
from tools.cluster.processes import free_port

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
API = "rljob.dev/v1alpha1"
NOW = "2026-01-31T12:00:00Z"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rljob(cluster: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command in this process with a kubeconfig: (exit code, stdout, stderr)."""

    def command(
        *arguments: Any, kubeconfig: Path = cluster.kubeconfig, entry: Callable[[], None] = main
    ) -> tuple[int, str, str]:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setattr(sys, "argv", ["rljob", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            entry()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    monkeypatch.setattr("rljob.cli.cluster_commands._program", ["rljob"])
    return command


def condition(kind: str, holds: bool, reason: str, message: str = "") -> Object:
    status = "True" if holds else "False"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}


@pytest.fixture
def job(cluster: ControlPlane, namespace: str) -> Job:
    return Job(cluster, namespace, "quickstart")


class Job:
    """An RLJob without an operator; the test writes its status."""

    def __init__(self, cluster: ControlPlane, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.path = f"/apis/{API}/namespaces/{namespace}/rljobs/{name}"
        body = yaml.safe_load(QUICKSTART.read_text())
        body["metadata"] = {"name": name, "namespace": namespace}
        cluster.api.create(body)

    def get(self) -> Object:
        return self.cluster.api.get(self.path)

    def write_status(self, *conditions: Object, **status: Any) -> None:
        """Write the status as the operator does."""
        identity = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": self.name}}
        body = {**identity, "status": {"conditions": list(conditions), **status}}
        self.cluster.api.apply(f"{self.path}/status", body, "rljob-operator")

    def coordinator(self) -> None:
        """Create a pod with the labels of the coordinator; kwok reports that it runs."""
        labels = {"rljob.dev/job": self.name, "rljob.dev/role": "coordinator"}
        ports = [{"name": "http", "containerPort": 8080}]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{self.name}-coordinator-0", "namespace": self.namespace, "labels": labels},
            "spec": {"containers": [{"name": "main", "image": "none", "ports": ports}]},
        }
        self.cluster.api.create(body)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}-coordinator-0"
        self.cluster.api.wait_for(lambda: self.cluster.api.get(path)["status"]["phase"] == "Running")


RUN = {
    "state": "Running",
    "progress": {"step": 12, "steps": 50, "text": "12/50 24%", "seconds": 60, "etaSeconds": 190},
    "lastCheckpoint": {"step": 10, "path": "checkpoints/step-000010"},
}
READY = condition("Ready", True, "Running", "all roles are ready")


# --- missing objects and rights -------------------------------------------------------------------------------------


def one_message(answer: tuple[int, str, str], code: int) -> str:
    assert answer[:2] == (code, ""), answer
    assert answer[2].count("\n") == 1 and "Traceback" not in answer[2], answer[2]
    return answer[2].removeprefix("rljob: ").rstrip("\n")


def test_an_unknown_context_is_reported_with_the_known_contexts(rljob: Command, cluster: ControlPlane) -> None:
    message = one_message(rljob("status", "--context", "prod"), 2)
    assert message == f"{cluster.kubeconfig}: there is no context 'prod'; there are test"


def test_an_unreachable_api_server_is_named(rljob: Command, cluster: ControlPlane, tmp_path: Path) -> None:
    config = changed(cluster.kubeconfig, tmp_path, server=f"https://127.0.0.1:{free_port('127.0.0.1')}")
    message = one_message(rljob("status", "-n", "x", kubeconfig=config), 1)
    assert (
        "of context test cannot be reached: connection refused; check that it runs, or choose another --context"
        in message
    )


def test_an_api_server_of_another_authority_is_not_trusted(
    rljob: Command, cluster: ControlPlane, tmp_path: Path
) -> None:
    config = changed(cluster.kubeconfig, tmp_path, **{"certificate-authority-data": None})
    message = one_message(rljob("status", "-n", "x", kubeconfig=config), 2)
    assert "is not trusted: " in message and "correct certificate-authority-data in the kubeconfig" in message


def test_expired_credentials_are_reported(rljob: Command, cluster: ControlPlane, tmp_path: Path) -> None:
    config = changed(cluster.kubeconfig, tmp_path, user={"token": "expired"})
    message = one_message(rljob("status", "-n", "x", kubeconfig=config), 2)
    assert message == (
        "context test does not accept the credentials of user test: they have expired or are wrong; log in again"
    )


def test_a_credential_plugin_is_called_again_after_a_rejected_token(
    rljob: Command, cluster: ControlPlane, tmp_path: Path, job: Job
) -> None:
    token = yaml.safe_load(cluster.kubeconfig.read_text())["users"][0]["user"]["token"]
    program = tmp_path / "login"
    outputs = [json.dumps({"status": {"token": each}}) for each in ("withdrawn", token)]
    called = tmp_path / "called"
    program.write_text(
        f"#!/bin/sh\nif [ -e {called} ]; then echo '{outputs[1]}'; else touch {called}; echo '{outputs[0]}'; fi\n"
    )
    program.chmod(0o755)
    execution = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login"}
    config = changed(cluster.kubeconfig, tmp_path, user={"exec": execution})
    assert rljob("status", "-n", job.namespace, kubeconfig=config)[0] == 0


def test_without_the_crds_the_error_names_the_chart(rljob: Command) -> None:
    with ControlPlane(("etcd", "apiserver")) as bare:
        message = one_message(rljob("status", "-n", "default", kubeconfig=bare.kubeconfig), 2)
        applied = one_message(rljob("apply", QUICKSTART, kubeconfig=bare.kubeconfig), 2)
    assert (
        message
        == applied
        == ("context test does not serve RLJobs; install the chart rljob-crds there, or choose another --context")
    )


def test_an_unknown_job_is_reported_with_the_known_jobs(rljob: Command, job: Job) -> None:
    message = one_message(rljob("status", "sums", "-n", job.namespace), 2)
    assert message == f"there is no RLJob 'sums' in namespace {job.namespace} of context test; there are quickstart"
    message = one_message(rljob("status", "runs/sums", "-n", job.namespace), 2)
    assert "there is no RLJob 'runs/sums'" in message
    message = one_message(rljob("audit", "-n", "nowhere"), 2)
    assert (
        message
        == "there is no RLJob in namespace nowhere of context test; the namespace does not exist; give another with -n"
    )


@pytest.mark.parametrize("name", ["../../api", "a b", "A"])
def test_an_invalid_namespace_is_rejected_before_any_request(rljob: Command, name: str) -> None:
    message = one_message(rljob("status", "-n", name), 2)
    assert message == f"{name!r} is not a valid name of a namespace; write it like team-a"


def test_without_a_name_the_only_active_job_is_used(rljob: Command, cluster: ControlPlane, job: Job) -> None:
    other = Job(cluster, job.namespace, "other")
    message = one_message(rljob("stop", "-n", job.namespace), 2)
    assert message.startswith("several RLJobs are active") and "(other, quickstart); name one of them" in message
    other.write_status(condition("Complete", True, "Succeeded"))
    code, out, _ = rljob("status", "-n", job.namespace)
    assert code == 0 and out.startswith("quickstart")


def test_a_missing_right_is_named(rljob: Command, cluster: ControlPlane, job: Job) -> None:
    config = cluster.service_account_kubeconfig(job.namespace, "nobody")
    for command in (("status",), ("logs",), ("stop", "quickstart"), ("apply", QUICKSTART)):
        message = one_message(rljob(*command, "-n", job.namespace, kubeconfig=config), 2)
        assert (
            message.startswith("context test does not allow it: rljobs.rljob.dev ") and "is forbidden: User" in message
        )
        assert message.endswith("; ask its administrator for the right")


def test_without_port_forwarding_the_status_comes_from_the_rljob(
    rljob: Command, cluster: ControlPlane, job: Job
) -> None:
    job.coordinator()
    job.write_status(READY)
    cluster.api.apply(f"{job.path}/status", identity(job, {"run": RUN}), "rljob-coordinator")
    rules = [
        {"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    ]
    config = granted(cluster, job.namespace, "viewer", rules)
    code, out, err = rljob("status", "quickstart", "-n", job.namespace, kubeconfig=config)
    assert (code, err) == (0, "") and "12/50" in out and "running" in out
    assert "note " in out and "from the RLJob" in out and "pods/portforward" in out
    message = one_message(rljob("samples", "quickstart", "-n", job.namespace, kubeconfig=config), 2)
    assert "pods/portforward" in message


# --- what the RLJob reports when its coordinator cannot be asked ----------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([], "no operator has reconciled quickstart yet; check that the chart rljob is installed and its pod runs"),
        (
            [condition("Ready", False, "PodsPending", "1 of 1 coordinator pod pending: insufficient memory")],
            "the coordinator of quickstart does not answer; the RLJob reports PodsPending: 1 of 1 coordinator "
            "pod pending: insufficient memory",
        ),
        (
            [condition("Suspended", True, "Suspended")],
            "quickstart is suspended and has no pods; rljob resume resumes it, and its claim quickstart-storage "
            "keeps ledger and checkpoints",
        ),
        (
            [condition("Complete", True, "Succeeded")],
            "quickstart has succeeded and its coordinator has gone (spec.keepCoordinatorSeconds); its claim "
            "quickstart-storage keeps ledger and checkpoints, and rljob status shows how it ended",
        ),
    ],
)
def test_the_rljob_explains_a_missing_coordinator(
    rljob: Command, job: Job, conditions: list[Object], message: str
) -> None:
    if conditions:
        job.write_status(*conditions)
    for command in ("samples", "audit"):
        assert one_message(rljob(command, "quickstart", "-n", job.namespace), 1) == message


@pytest.mark.parametrize(
    ("conditions", "code", "state"),
    [
        ([], 0, "starting: no operator has reconciled it yet"),
        ([READY], 0, "running"),
        (
            [condition("Ready", False, "TrainerRestarting", "attempt 2 begins in 4 s")],
            0,
            "running: attempt 2 begins in 4 s",
        ),
        ([condition("Failed", True, "RunFailed", "the disk is full")], 1, "failed: the disk is full"),
        ([condition("Suspended", True, "Suspended")], 3, "suspended: rljob resume resumes it"),
        ([condition("Complete", True, "Succeeded")], 0, "succeeded"),
    ],
)
def test_status_works_without_a_coordinator(
    rljob: Command, job: Job, conditions: list[Object], code: int, state: str
) -> None:
    roles = [
        {"name": "trainer", "desired": 1, "ready": 0, "restarts": 2, "lastExit": "exit code 1", "summary": "starts"}
    ]
    if conditions:
        job.write_status(*conditions, roles=roles)
        job.cluster.api.apply(f"{job.path}/status", identity(job, {"run": RUN}), "rljob-coordinator")
    found = rljob("status", "quickstart", "-n", job.namespace)
    assert (found[0], found[2]) == (code, "") and f"state      {state}" in found[1]
    _, out, _ = rljob("status", "quickstart", "-n", job.namespace, "-o", "json")
    data = json.loads(out)
    assert (data["name"], data["context"], data["namespace"]) == ("quickstart", "test", job.namespace)
    if conditions:
        assert data["status"]["progress"]["step"] == 12
        assert data["components"] == [
            {"name": "trainer", "state": data["components"][0]["state"], "restarts": 2, "last_exit": "exit code 1"}
        ]


def test_status_watched_ends_with_the_job(rljob: Command, job: Job) -> None:
    job.write_status(READY)
    timer = threading.Timer(2.0, job.write_status, [condition("Complete", True, "Succeeded")])
    timer.start()
    code, out, _ = rljob("status", "--watch", "-n", job.namespace)
    timer.join()
    assert code == 0 and "starting" in out and "succeeded" in out.splitlines()[-1] + out.splitlines()[-2]


def test_an_unreachable_coordinator_is_reported(rljob: Command, job: Job) -> None:
    job.coordinator()
    job.write_status(READY)
    message = one_message(rljob("samples", "-n", job.namespace), 1)
    assert message.startswith(
        "the coordinator of quickstart does not answer; the RLJob reports Running: all roles are ready ("
    )


def test_logs_of_a_job_without_pods_report_its_state(rljob: Command, job: Job) -> None:
    message = one_message(rljob("logs", "-n", job.namespace, "quickstart"), 1)
    assert (
        message.startswith("RLJob quickstart in namespace")
        and "has no pods: no operator has reconciled it yet; " in message
    )
    job.write_status(condition("Suspended", True, "Suspended"))
    for options in ([], ["-f"], ["-o", "json"]):
        message = one_message(rljob("logs", "-n", job.namespace, "quickstart", *options), 1)
        assert message.endswith("has no pods: quickstart is suspended; rljob resume resumes it")
    message = one_message(rljob("logs", "-n", job.namespace, "quickstart", "trainer"), 1)
    assert message.startswith("there is no pod of trainer of RLJob quickstart in namespace")
    assert message.endswith(": quickstart is suspended; rljob resume resumes it")


def test_top_reports_why_metrics_are_missing(rljob: Command, job: Job) -> None:
    job.write_status(READY)
    code, out, _ = rljob("top", "-n", job.namespace, "quickstart", "--count", 1, "--seconds", 0.1)
    assert code == 0 and "there are no pods" in out
    job.coordinator()
    code, out, _ = rljob("top", "-n", job.namespace, "quickstart", "--count", 1, "--seconds", 0.1)
    row = next(line.split() for line in out.splitlines() if line.startswith("coordinator-0"))
    assert row == ["coordinator-0", "running", "–", "–", "0"]
    assert "there is no metrics-server in the cluster" in " ".join(out.split())


def test_followed_logs_wait_for_the_pods_of_an_active_job(rljob: Command, job: Job) -> None:
    timer = threading.Timer(2.0, job.write_status, [condition("Complete", True, "Succeeded")])
    timer.start()
    code, out, err = rljob("logs", "-n", job.namespace, "quickstart", "-f")
    assert (code, out) == (0, "")
    assert err.startswith(f"rljob: waiting for pods of RLJob quickstart in namespace {job.namespace} of context test: ")
    assert len(err.splitlines()) == 1
    timer.join()


def test_an_unknown_name_is_reported_as_neither_job_nor_component(rljob: Command, job: Job) -> None:
    job.coordinator()
    message = one_message(rljob("logs", "-n", job.namespace, "quikstart"), 2)
    assert message == (
        "there is no RLJob 'quikstart', and no component 'quikstart' of RLJob quickstart in namespace "
        f"{job.namespace} of context test; "
        "name one of coordinator, initializer, reward-sums, rollout-main, runner, trainer"
    )
    message = one_message(rljob("logs", "-n", job.namespace, "quickstart", "trainr"), 2)
    assert message.startswith("there is no component 'trainr' of RLJob quickstart")


# --- apply ------------------------------------------------------------------------------------------------------------


def test_apply_creates_changes_or_leaves_unchanged(rljob: Command, cluster: ControlPlane, namespace: str) -> None:
    where = f"the RLJob quickstart in namespace {namespace} is"
    path = f"/apis/{API}/namespaces/{namespace}/rljobs/quickstart"
    assert rljob("apply", QUICKSTART, "-n", namespace, "--dry-run") == (0, f"{where} created (dry run)\n", "")
    assert not cluster.api.exists(path)
    code, out, err = rljob("apply", QUICKSTART, "-n", namespace)
    assert (code, err, out.splitlines()[0]) == (0, "", f"{where} created")
    assert f"rljob status --watch -n {namespace} quickstart" in out
    assert cluster.api.get(path)["spec"]["training"]["steps"] == 50
    assert rljob("apply", QUICKSTART, "-n", namespace)[1].startswith(f"{where} unchanged")
    longer = ("apply", QUICKSTART, "-n", namespace, "--set", "spec.training.steps=60")
    assert rljob(*longer)[1].startswith(f"{where} changed")
    assert cluster.api.get(path)["spec"]["training"]["steps"] == 60


def test_apply_sends_the_fields_of_the_manifest_without_defaults(
    rljob: Command, cluster: ControlPlane, namespace: str
) -> None:
    rljob("apply", QUICKSTART, "-n", namespace)
    (entry,) = cluster.api.get(f"/apis/{API}/namespaces/{namespace}/rljobs/quickstart")["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("rljob", "Apply")
    written = yaml.safe_load(QUICKSTART.read_text())["spec"]
    assert {name.removeprefix("f:") for name in entry["fieldsV1"]["f:spec"]} == set(written)


def test_apply_rejects_unknown_fields_local_paths_and_immutable_changes(
    rljob: Command, cluster: ControlPlane, namespace: str
) -> None:
    message = one_message(rljob("apply", QUICKSTART, "-n", namespace, "--set", "spec.training.stepz=3"), 2)
    assert message == f"{QUICKSTART}: spec.training.stepz: unknown field; did you mean steps?"
    message = one_message(rljob("apply", QUICKSTART, "-n", namespace, "--set", "spec.models[policy].source=/data/m"), 2)
    assert message.startswith(f"{QUICKSTART}: spec.models[0].source: '/data/m' is a path of one machine")
    rljob("apply", QUICKSTART, "-n", namespace)
    message = one_message(rljob("apply", QUICKSTART, "-n", namespace, "--set", "spec.seed=77"), 2)
    assert message.startswith(f"{QUICKSTART}: spec.seed: ") and "field is immutable" in message


def test_apply_takes_the_namespace_from_the_manifest_unless_another_is_given(
    rljob: Command, cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    body = yaml.safe_load(QUICKSTART.read_text())
    body["metadata"]["namespace"] = namespace
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    assert rljob("apply", file)[1].startswith(f"the RLJob quickstart in namespace {namespace} is created")
    message = one_message(rljob("apply", file, "-n", "other"), 2)
    assert message == f"{file}: metadata.namespace: {namespace} in the manifest, but -n is other; omit one of them"
    message = one_message(rljob("apply", QUICKSTART, "-n", "nowhere"), 2)
    assert message == "there is no namespace nowhere of context test; create the namespace, or give another with -n"


def test_a_field_of_another_manager_is_taken_over_only_with_force_conflicts(
    rljob: Command, cluster: ControlPlane, namespace: str
) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", str(QUICKSTART))
    more = ("apply", QUICKSTART, "-n", namespace, "--set", "spec.training.steps=70")
    message = one_message(rljob(*more), 2)
    assert (
        message
        == f'{QUICKSTART}: spec.training.steps: set by "kubectl-client-side-apply"; --force-conflicts takes it over'
    )
    assert rljob(*more, "--force-conflicts")[0] == 0


# --- stop and resume --------------------------------------------------------------------------------------------------


def suspends(job: Job, seen: list[Object]) -> threading.Thread:
    """Act as the operator when spec.suspend becomes true: write the status Suspended. ``seen`` gets the spec."""

    def write_suspended() -> None:
        body = job.cluster.api.wait_for(lambda: (found := job.get())["spec"].get("suspend") and found)
        seen.append(body["spec"])
        generation = body["metadata"]["generation"]
        job.write_status(condition("Suspended", True, "Suspended"), observedGeneration=generation)
        job.cluster.api.apply(
            f"{job.path}/status", identity(job, {"run": RUN | {"state": "Suspended"}}), "rljob-coordinator"
        )

    thread = threading.Thread(target=write_suspended)
    thread.start()
    return thread


@pytest.mark.parametrize("now", [False, True])
def test_stop_suspends_and_resume_continues_the_run(rljob: Command, job: Job, now: bool) -> None:
    job.write_status(READY)
    job.cluster.api.apply(f"{job.path}/status", identity(job, {"run": RUN}), "rljob-coordinator")
    seen: list[Object] = []
    operator = suspends(job, seen)
    code, out, err = rljob("stop", "-n", job.namespace, *(["--now"] if now else []))
    operator.join()
    assert (code, err) == (0, "")
    assert out == (
        "suspended at step 12, checkpoint quickstart-storage:checkpoints/step-000010; rljob resume resumes it\n"
    )
    assert seen[0]["suspendGraceSeconds"] == (0 if now else 120)
    spec = job.get()["spec"]
    assert spec["suspend"] is True and spec["suspendGraceSeconds"] == 120, "the original value is restored"
    code, out, _ = rljob("stop", "-n", job.namespace, "quickstart")
    assert code == 0 and out.endswith("is not running; it is suspended\n")
    assert rljob("resume", "-n", job.namespace, "quickstart")[0] == 0
    assert job.get()["spec"]["suspend"] is False


def test_resume_restores_the_grace_period_after_an_interrupted_stop_now(rljob: Command, job: Job) -> None:
    job.write_status(condition("Suspended", True, "Suspended"))
    note = {"annotations": {"rljob.dev/suspend-grace-seconds": "300"}}
    job.cluster.api.patch(job.path, {"metadata": note, "spec": {"suspend": True, "suspendGraceSeconds": 0}})
    assert rljob("resume", "-n", job.namespace, "quickstart")[0] == 0
    body = job.get()
    assert body["spec"]["suspendGraceSeconds"] == 300 and not body["metadata"].get("annotations")


def test_apply_may_change_a_field_that_stop_has_set(rljob: Command, cluster: ControlPlane, namespace: str) -> None:
    rljob("apply", QUICKSTART, "-n", namespace)
    path = f"/apis/{API}/namespaces/{namespace}/rljobs/quickstart"
    cluster.api.patch(path, {"spec": {"suspend": True}}, fieldManager="rljob")
    rljob("apply", QUICKSTART, "-n", namespace)
    assert cluster.api.get(path)["spec"]["suspend"] is True, "the manifest does not set suspend to false"
    assert rljob("apply", QUICKSTART, "-n", namespace, "--set", "spec.suspend=false")[0] == 0
    assert cluster.api.get(path)["spec"]["suspend"] is False


# --- kubectl rljob ----------------------------------------------------------------------------------------------------


def test_the_kubectl_plugin_works_on_rljobs_only(
    rljob: Command, cluster: ControlPlane, tmp_path: Path, job: Job
) -> None:
    config = changed(cluster.kubeconfig, tmp_path, namespace=job.namespace)
    code, out, _ = rljob("status", kubeconfig=config, entry=plugin)
    assert code == 0 and out.startswith("quickstart  test/")
    _, out, _ = rljob("resume", "--help", entry=plugin)
    assert "Usage: kubectl rljob resume" in out
    _, out, _ = rljob("--help", entry=plugin)
    assert "  audit " in out and "  run " not in out and "  evaluate " not in out
    code, _, err = rljob("evaluate", "quickstart", entry=plugin)
    assert code == 2 and err.endswith("evaluate works on this machine and not in a cluster; write: rljob evaluate\n")


def test_without_a_cluster_option_no_request_is_sent_to_a_cluster(
    rljob: Command, job: Job, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    message = one_message(rljob("status", "quickstart"), 2)
    assert message.startswith("there is no run 'quickstart': give a run directory, or a name under runs/")


# --- kubeconfigs ------------------------------------------------------------------------------------------------------


def identity(job: Job, status: Object) -> Object:
    return {"apiVersion": API, "kind": "RLJob", "metadata": {"name": job.name}, "status": status}


def changed(kubeconfig: Path, directory: Path, user: Object | None = None, namespace: str = "", **cluster: Any) -> Path:
    """Return a copy of a kubeconfig with another user, namespace or cluster."""
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"] = user or config["users"][0]["user"]
    if namespace:
        config["contexts"][0]["context"]["namespace"] = namespace
    entry = config["clusters"][0]["cluster"] | cluster
    config["clusters"][0]["cluster"] = {name: value for name, value in entry.items() if value is not None}
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def granted(cluster: ControlPlane, namespace: str, name: str, rules: list[Object]) -> Path:
    """Return the kubeconfig of a service account with the rights ``rules``."""
    config = cluster.service_account_kubeconfig(namespace, name)
    metadata = {"name": name, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    cluster.api.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules})
    cluster.api.create(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
    )
    return config
