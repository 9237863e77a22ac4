"""The command line on jobs in pods, through the API server: the same output as on one machine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from e2e.fakes.harness import make_job, run_harness
from e2e.fakes.model import write_model
from e2e.pods.job import IDLE_RESOURCES, RESTRICTED, WAIT_FOR_SIGTERM, Job
from rljob.cli.main import main
from rljob.protocol.checkpoint_files import STATE_FILE
from tools.cluster.client import API
from tools.cluster.node import Node
from tools.cluster.node.install import Installation

Answer = tuple[int, str, str]
DONE, WAITING = "done", "waiting"
WEIGHTS = b'{"w": {"dtype": "F32", "shape": [320000], "data_offsets": [0, 1280000]}}'
MODEL = {
    "config.json": b'{"model_type": "none"}',
    "model.safetensors": len(WEIGHTS).to_bytes(8, "little") + WEIGHTS + bytes(range(256)) * 5000,
}
UNPACK = """
import base64, io, sys, tarfile
tarfile.open(fileobj=io.BytesIO(base64.b64decode(sys.stdin.read()))).extractall("/storage")
"""
IDLE = ["python", "-c", f"print('idle', flush=True)\n{WAIT_FOR_SIGTERM}"]

pytestmark = pytest.mark.timeout(240)


class Cli:
    """The command line as a user of a kubeconfig runs it."""

    def __init__(self, node: Node, namespace: str) -> None:
        self.node, self.namespace = node, namespace

    def __call__(self, *arguments: Any, kubeconfig: Path | None = None) -> Answer:
        """Run a command in the namespace; return exit code, stdout and stderr."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(kubeconfig or self.node.kubeconfig))
            return local(*arguments, "-n", self.namespace)

    def process(self, *program: str) -> subprocess.Popen[str]:
        """Start a program in the namespace."""
        return subprocess.Popen(
            [*program, "-n", self.namespace],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{self.node.bin}:{os.environ['PATH']}"
        return os.environ | {"KUBECONFIG": str(self.node.kubeconfig), "PATH": path}


@pytest.fixture(scope="module")
def namespace(node: Node, installed: Installation) -> Iterator[str]:
    """A namespace that takes restricted pods only."""
    name = node.namespace("cli", RESTRICTED)
    yield name
    node.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="module")
def cli(node: Node, namespace: str) -> Cli:
    return Cli(node, namespace)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with fake components on this machine, to its end; its newest checkpoint is a model."""
    storage = tmp_path_factory.mktemp("run") / "storage"
    newest = storage / "checkpoints" / "step-000008"
    newest.mkdir(parents=True)
    for name, data in MODEL.items():  # the trainer records all files in the directory
        (newest / name).write_bytes(data)

    async def to_its_end() -> None:
        async with run_harness(make_job(), storage) as harness:
            harness.play("trainer", harness.trainer().run())
            while not (newest / STATE_FILE).exists() or not _succeeded(storage):
                await asyncio.sleep(0.1)

    asyncio.run(to_its_end())
    return storage


def _succeeded(storage: Path) -> bool:
    path = storage / "status.json"
    return path.exists() and json.loads(path.read_bytes())["state"] == "Succeeded"


def manifest(name: str, image: str, claim: str) -> dict[str, Any]:
    """Return an RLJob whose trainer and engines only wait."""
    body: dict[str, Any] = make_job().model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    fine = {"exec": {"command": ["true"]}}
    probes = {"livenessProbe": fine, "readinessProbe": fine}
    container = {"name": "main", "image": image, "command": IDLE, "resources": IDLE_RESOURCES, **probes}
    template = {"spec": {"containers": [container]}}
    spec = body["spec"]
    spec["trainer"] = spec.get("trainer", {}) | {"template": template}
    spec["rollouts"] = [pool | {"template": template} for pool in spec["rollouts"]]
    spec["storage"] = {"claim": claim}
    return {"apiVersion": API, "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def done(node: Node, namespace: str, installed: Installation, run: Path) -> Job:
    """A job whose claim holds the run that is done: its coordinator finds nothing left to do."""
    _fill_claim(node, namespace, installed.images["coordinator"], DONE, run)
    job = Job(node, namespace, manifest(DONE, installed.images["runner"], DONE))
    job.apply()
    job.until(lambda: job.condition("Complete")[0] == "True", 90, "Complete")
    job.has_pods("coordinator", 1, 90)  # the run may end before the node reports that the pod runs
    return job


@pytest.fixture(scope="module")
def waiting(
    node: Node, namespace: str, installed: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """A job that continues and waits for its trainer; its claim holds nothing but the model."""
    storage = tmp_path_factory.mktemp("fresh")
    write_model(storage / "model")
    _fill_claim(node, namespace, installed.images["coordinator"], WAITING, storage)
    job = Job(node, namespace, manifest(WAITING, installed.images["runner"], WAITING))
    job.apply()
    job.all_up(90)
    yield job
    job.delete()


def _fill_claim(node: Node, namespace: str, image: str, name: str, content: Path) -> None:
    """Copy a directory into a new claim, by a pod that has it."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": namespace}, "spec": spec}
    node.api.create({"apiVersion": "v1", **claim})
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": IDLE,
        "securityContext": security,
        "volumeMounts": [{"name": "storage", "mountPath": "/storage"}],
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": name}}],
        "terminationGracePeriodSeconds": 0,
    }
    metadata = {"name": f"filling-{name}", "namespace": namespace}
    node.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
    path = f"/api/v1/namespaces/{namespace}/pods/filling-{name}"
    node.api.wait_condition(path, "Ready", seconds=60)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(content, arcname=".", filter=_anybodys)
    text = base64.b64encode(packed.getvalue()).decode()
    node.kubectl("exec", "-i", "-n", namespace, f"filling-{name}", "--", "python", "-c", UNPACK, stdin=text)
    node.api.delete(path)
    node.api.wait_gone(path)


def _anybodys(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith(("-wal", "-shm", "/lock")) else entry


def local(*arguments: Any) -> Answer:
    """Run a command in this process; return exit code, stdout and stderr."""
    out, err, code = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO()), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["rljob", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, _text(out), _text(err)


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)  # which flushes
    return stream.read()


def viewer(node: Node, namespace: str) -> Path:
    """Return the kubeconfig of a user who may look at the namespace and no more."""
    subject = {"kind": "ServiceAccount", "name": "viewer", "namespace": namespace}
    config = node.service_account_kubeconfig(namespace, "viewer")
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "viewer", "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [subject],
    }
    node.api.create(binding)
    return config


# --- a job that is done -----------------------------------------------------------------------------------------------


def test_an_audit_through_the_api_server_is_that_of_the_ledger(cli: Cli, done: Job, run: Path) -> None:
    code, out, err = cli("audit", DONE, "-o", "json")
    assert (code, err) == (0, ""), out
    report, own = json.loads(out), json.loads(local("audit", run, "-o", "json")[1])
    assert report["ok"] and report["finished"]
    assert report["counts"] == own["counts"]
    assert [(check["name"], check["examined"]) for check in report["checks"]] == [
        (check["name"], check["examined"]) for check in own["checks"]
    ]


@pytest.mark.parametrize("how", [("-o", "json"), ("-o", "jsonl"), ("--step", "3", "--sort", "reward", "--reverse"), ()])
def test_samples_are_the_same_as_on_the_runs_own_machine(cli: Cli, done: Job, run: Path, how: tuple[str, ...]) -> None:
    assert cli("samples", DONE, *how) == local("samples", run, *how)


def test_a_sample_is_shown_as_on_the_runs_own_machine(cli: Cli, done: Job, run: Path) -> None:
    name = json.loads(cli("samples", DONE, "--limit", 1, "-o", "json")[1])[0]["id"]
    answers = cli("show", DONE, name, "-o", "json"), local("show", run, name, "-o", "json")
    assert [answer[0] for answer in answers] == [0, 0], answers
    found, own = (json.loads(answer[1]) for answer in answers)
    assert found["sample"] == own["sample"] and found["siblings"] == own["siblings"]
    assert [len(turn["written"]) for turn in found["turns"]] == [len(turn["written"]) for turn in own["turns"]]


def test_what_is_not_there_is_said_in_the_same_words(cli: Cli, done: Job, run: Path) -> None:
    for arguments in (("show", "g999999.0"), ("samples", "--task", "none"), ("samples", "--step", "999")):
        command, *rest = arguments
        assert cli(command, DONE, *rest) == local(command, run, *rest)


def test_a_model_is_exported_whole_or_not_at_all(cli: Cli, done: Job, tmp_path: Path) -> None:
    code, out, err = cli("export", DONE, tmp_path / "model")
    assert (code, err) == (0, "") and out.startswith(f"{tmp_path / 'model'}: the model of step 8 of the ")
    code, out, err = cli("export", DONE)
    assert (code, out) == (2, "") and f"{DONE} is a run; give a destination too" in err
    found = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert found.items() >= MODEL.items()
    code, out, err = cli("export", DONE, tmp_path / "other", "--step", 5)
    assert (code, out) == (2, "") and err.startswith("rljob: there is no checkpoint of step 5; there are ")
    code, _, err = cli("export", DONE, tmp_path / "model")
    assert code == 2 and "is not empty; give a directory that does not exist yet" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_status_of_a_job_that_is_done_has_its_whole_history(cli: Cli, done: Job) -> None:
    code, out, err = cli("status", DONE, "-o", "json")
    found = json.loads(out)
    assert (code, err, found["state"], found["running"]) == (0, "", "succeeded", False)
    assert found["namespace"] == cli.namespace and len(found["status"]["history"]) == 8
    assert {component["state"] for component in found["components"]} == {"stopped"}


def test_it_is_a_plugin_of_kubectl(cli: Cli, done: Job) -> None:
    with cli.process("kubectl", "rljob", "samples", DONE) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == cli("samples", DONE)


def test_who_may_only_look_sees_what_the_rljob_says_and_the_logs(
    node: Node, cli: Cli, namespace: str, done: Job, waiting: Job
) -> None:
    config = viewer(node, namespace)
    code, out, _ = cli("status", DONE, kubeconfig=config)
    assert code == 0 and "succeeded" in out and "pods/portforward" in out
    code, out, err = cli("samples", DONE, kubeconfig=config)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "does not allow it" in err and "pods/portforward" in err
    code, out, err = cli("stop", WAITING, kubeconfig=config)
    assert (code, out) == (2, "") and 'cannot patch resource "rljobs"' in err
    code, out, err = cli("logs", WAITING, "trainer", kubeconfig=config)
    assert (code, out, err) == (0, "idle\n", "")


# --- a running job ----------------------------------------------------------------------------------------------------


def test_status_says_what_the_coordinator_says_now(cli: Cli, waiting: Job) -> None:
    says = "starting: waiting for the trainer and an engine to connect"  # once the runner has connected
    waiting.until(lambda: says in cli("status", WAITING)[1], 60, says)
    code, out, err = cli("status", WAITING)
    assert (code, err) == (0, "")
    assert says in out
    assert "● coordinator 1/1" in out and "● rollout-main 1/1" in out


def test_logs_are_of_all_pods_by_name_or_of_those_that_are_named(cli: Cli, waiting: Job) -> None:
    code, out, err = cli("logs", WAITING)
    assert (code, err) == (0, "")
    said = {line.partition(" | ")[0].strip() for line in out.splitlines()}
    assert "coordinator-0" in said and any(name.startswith("rollout-main-") for name in said), said
    code, out, _ = cli("logs", WAITING, "rollout", "trainer", "-o", "json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["line"] for line in lines] == ["idle", "idle"]
    code, out, err = cli("logs", WAITING, "nobody")
    assert (code, out) == (2, "") and "there is no component 'nobody'" in err and "trainer" in err


def test_top_shows_what_each_pod_takes(cli: Cli, waiting: Job) -> None:
    code, out, err = cli("top", WAITING, "--count", 2, "--seconds", 0.5, "-o", "json")
    frames = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(frames)) == (0, "", 2), err
    components = {component["name"]: component for component in frames[-1]["components"]}
    assert components["coordinator-0"]["memory"] > 20e6 and components["coordinator-0"]["state"] == "running"


def test_stop_suspends_followed_logs_end_and_resume_continues_the_run(cli: Cli, waiting: Job) -> None:
    waiting.run_status()
    command = (sys.executable, "-m", "rljob.cli.main", "logs", WAITING, "coordinator", "-f")
    with cli.process(*command) as following:
        try:
            lines = Collected(following)
            lines.until(lambda found: len(found) > 0)
            code, out, err = cli("stop", WAITING)
            assert (code, out, err) == (0, "suspended at step 0; rljob resume resumes it\n", "")
            assert following.wait(60) == 0
        finally:
            following.kill()
    assert waiting.pods() == []
    code, out, _ = cli("status", WAITING)
    assert code == 3 and "suspended" in out
    code, out, err = cli("samples", WAITING)
    assert (code, out) == (1, "") and f"{WAITING} is suspended and has no pods; rljob resume resumes it" in err
    assert cli("stop", WAITING)[:2] == (
        0,
        f"the RLJob {WAITING} in namespace {cli.namespace} of context {cli.node.context} is not running; it is "
        "suspended\n",
    )
    assert cli("resume", WAITING)[0] == 0
    waiting.all_up(90)
    assert cli("status", WAITING)[0] == 0


class Collected:
    """Lines of a process as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._found: list[str] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, probe: Callable[[list[str]], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not probe(self._found):
            assert time.monotonic() < deadline, self._found
            time.sleep(0.05)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._found.append(line)


def test_when_the_coordinator_has_gone_it_is_said_what_is_left(cli: Cli, done: Job) -> None:
    done.change(keepCoordinatorSeconds=0)
    pods = done.node.api.path("v1", "Pod", done.namespace)
    # A coordinator that is being ended still answers for seconds.
    done.until(lambda: not done.node.api.list(pods, labelSelector=f"rljob.dev/job={DONE}"), 60, "no pods")
    code, out, err = cli("audit", DONE)
    assert (code, out) == (1, "")
    assert err == (
        "rljob: done has succeeded and its coordinator has gone (spec.keepCoordinatorSeconds); its claim done keeps "
        "ledger and checkpoints, and rljob status shows how it ended\n"
    )
    code, out, err = cli("status", DONE)
    assert (code, err) == (0, "") and "succeeded" in out and "8/8" in out
