"""`rljob run` as a process, with fake components: its output, its files, and the processes that it kills."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.tests.fakes.launcher import FAKES, SUCCEEDED, status
from e2e.fakes.hub import serving_hub
from rljob.api.job_status import CheckpointStatus
from rljob.protocol.run_status import decode_status, encode_status


def until_none_is_left(launcher):
    deadline = time.monotonic() + 100
    while launcher.alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert launcher.alive() == []


def test_a_successful_run_prints_its_results(launcher):
    launcher.plot = "yes"
    process = launcher.start()
    launcher.wait_for("run", "Running")
    launcher.answer(SUCCEEDED)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    assert any("step 2/3  reward 0.100  staleness 0.50  5,000 tokens/s  0:04 left" in line for line in lines)
    assert "held-out accuracy of sums: 0.250 before, 0.800 after (+0.550), on 1,024 problems" in lines
    assert f"checkpoint (Hugging Face format): {launcher.directory}/checkpoints/3" in lines
    assert f"logs: {launcher.directory}/logs" in lines
    assert f"plot of the reward: {launcher.directory}/reward.png" in lines
    assert (launcher.directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (launcher.directory / "job.yaml").read_text() == launcher.file.read_text()
    assert (launcher.directory / "tokens.json").stat().st_mode & 0o777 == 0o600
    assert launcher.alive() == []


def test_a_run_that_has_succeeded_prints_its_results_and_starts_nothing(launcher):
    warned = dataclasses.replace(SUCCEEDED, warnings=["the checkpoint of step 2 was refused", "lineage 1 starts"])
    launcher.answer(warned)
    code, out, _ = launcher.run()
    assert code == 0
    assert [out.count(f"warning: {warning}\n") for warning in warned.warnings] == [2, 2], "at once and in the summary"
    events = launcher.events()
    assert [event["message"] for event in events if event["event"] == "warning"] == warned.warnings
    (launcher.directory / "status.json").write_bytes(encode_status(warned))  # the fake coordinator does not write it
    code, out, _ = launcher.run()
    assert code == 0
    assert out.startswith("this run has already succeeded\n3 steps in 0:12\nheld-out accuracy of sums: 0.250 before")
    assert launcher.events() == events
    launcher.answer(dataclasses.replace(warned, warnings=["lineage 1 starts", "lineage 2 starts"], earlier_warnings=1))
    code, out, _ = launcher.run("--set", "spec.training.steps=4")
    assert code == 0
    assert "resuming the run" in out and out.count("lineage 1 starts") == 1, "only in the summary"
    assert out.count("lineage 2 starts") == 2, "the coordinator keeps the newest only, and counts the others"
    assert json.loads((launcher.directory / "job.json").read_text())["spec"]["training"]["steps"] == 4


def test_the_initializer_runs_once(launcher):
    launcher.answer(SUCCEEDED)
    assert launcher.run()[0] == 0
    launcher.answer(status())
    process = launcher.start()
    launcher.wait_for("initializer", "cached")
    assert len([e for e in launcher.events() if e["subject"] == "initializer" and e["event"] == "started"]) == 1
    process.terminate()
    process.communicate(timeout=100)


@pytest.mark.parametrize(("code", "expected"), [("2", 2), ("3", 1)])
def test_a_failed_initializer_ends_the_run_with_the_end_of_its_log(launcher, code, expected):
    launcher.program.write_text(f"#!/bin/sh\necho out of memory; exit {code}\n")
    returned, _, err = launcher.run()
    assert returned == expected
    assert err == (
        f"rljob: the initializer exited with code {code}; see the end of its log\n"
        f"{launcher.directory}/logs/initializer.log:\n  out of memory\n"
    )
    assert not [e for e in launcher.events() if e["subject"] == "trainer"]


def test_a_model_of_the_hub_is_downloaded_before_the_components_start(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("RLJOB_MODEL_CACHE", str(tmp_path / "cache"))
    del launcher.manifest["spec"]["initializer"]
    launcher.manifest["spec"]["models"][0]["source"] = "hf://org/tiny"
    launcher.answer(SUCCEEDED)
    with serving_hub() as hub:
        launcher.manifest["spec"]["downloads"] = {"hubEndpoint": hub.url}
        code, _, err = launcher.run()
        assert (code, err.splitlines()[0]) == (
            2,
            f"rljob: spec.models[0].source: {hub.url} has no model org/tiny (404); correct the name, or if it is "
            "private give a token that may read it: HF_TOKEN for rljob run, in a cluster the Secret in "
            "spec.downloads.secret",
        )
        commit = hub.add("org/tiny", {"config.json": b"{}"})
        assert launcher.run()[0] == 0
    assert json.loads((launcher.directory / "models.json").read_text()) == {"hf://org/tiny": commit}
    assert (tmp_path / "cache/hub/models--org--tiny/snapshots" / commit / "config.json").read_bytes() == b"{}"


def test_an_initializer_without_a_model_is_a_failure(launcher):
    launcher.program.write_text("#!/bin/sh\n")
    code, _, err = launcher.run()
    assert code == 1
    assert f"spec.models[0].source: the initializer created no directory {launcher.directory}/model" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_a_checkpoint_and_the_same_command_resumes(launcher, number):
    launcher.answer(status(last_checkpoint=CheckpointStatus(2, "checkpoints/step-000002")))
    process = launcher.start()
    launcher.wait_for("run", "Running")
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "writing a checkpoint; Ctrl-C again stops at once" in out
    assert err == (
        f"rljob: stopped at step 2, checkpoint of step 2 in {launcher.directory}/checkpoints/step-000002; "
        f"the same command resumes the run in {launcher.directory}\n"
    )
    assert launcher.wait_for("run", "suspended")
    assert "told to suspend" in (launcher.directory / "logs/coordinator.log").read_text()
    assert launcher.alive() == []
    launcher.answer(SUCCEEDED)
    code, out, _ = launcher.run()
    assert code == 0
    assert f"resuming the run in {launcher.directory}" in out


def test_a_run_past_its_deadline_fails_and_resumes_with_a_later_deadline(launcher):
    launcher.manifest["spec"]["activeDeadlineSeconds"] = 12  # the fake coordinator reports a run of 12 s
    launcher.answer(status(last_checkpoint=CheckpointStatus(2, "checkpoints/step-000002")))
    code, _, err = launcher.run()
    assert code == 1
    assert err == (
        "rljob: spec.activeDeadlineSeconds: the run has been up for 12 s; stopped at step 2, checkpoint of step 2 in "
        f"{launcher.directory}/checkpoints/step-000002; raise it to continue\n"
    )
    assert launcher.alive() == []
    launcher.manifest["spec"]["activeDeadlineSeconds"] = 13
    process = launcher.start()
    launcher.wait_for("run", "Running", 2)
    launcher.answer(SUCCEEDED)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and "resuming the run" in out


def test_a_run_without_a_step_is_stopped_without_a_checkpoint(launcher):
    launcher.answer(status(step=0))
    process = launcher.start()
    launcher.wait_for("run", "Running")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err == f"rljob: interrupted; the same command resumes the run in {launcher.directory}\n"
    assert launcher.wait_for("run", "interrupted")
    assert launcher.alive() == []


@pytest.mark.parametrize("pace", [[], ["slow"]])
def test_a_first_step_that_no_status_has_shown_is_kept(launcher, pace):
    launcher.components["coordinator"] = [*pace, *launcher.components["coordinator"]]
    launcher.answer(status(step=0))
    process = launcher.start()
    launcher.wait_for("run", "Running")
    launcher.answer(status(step=2))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert launcher.wait_for("run", "suspended")


def test_the_wait_for_a_silent_coordinator_ends_with_the_grace_period(launcher):
    launcher.manifest["spec"]["suspendGraceSeconds"] = 0.3
    process = launcher.start()
    launcher.wait_for("run", "Running")
    os.kill(launcher.wait_for("coordinator", "started")["pid"], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    launcher.wait_for("trainer", "exited")
    process.send_signal(signal.SIGINT)  # a stopped process does not end by itself
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert launcher.wait_for("run", "interrupted")


def test_a_second_ctrl_c_kills_the_remaining_processes(launcher):
    launcher.components["trainer"] = ["ignore"]
    process = launcher.start()
    launcher.wait_for("run", "Running")
    log = launcher.directory / "logs/trainer.log"
    while "ignoring" not in log.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    launcher.wait_for("runner", "exited")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert launcher.wait_for("trainer", "exited")["code"] == -signal.SIGKILL


def test_ctrl_c_during_the_initializer_stops_it(launcher):
    launcher.program.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {FAKES / 'component.py'} wait\n")
    process = launcher.start()
    launcher.wait_for("initializer", "started")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert launcher.alive() == []


def test_kill_9_of_rljob_run_leaves_nothing_running(launcher):
    process = launcher.start()
    launcher.wait_for("run", "Running")
    log = launcher.directory / "logs/runner.log"
    while log.read_text().count("waiting") < 2:
        time.sleep(0.005)
    assert len(launcher.alive()) == 4  # including a child of the runner in its own session
    process.kill()
    process.communicate(timeout=100)
    until_none_is_left(launcher)


def test_after_kill_9_of_rljob_run_and_its_reaper_a_new_run_kills_the_old_processes(launcher):
    launcher.components["runner"] = ["wait"]
    process = launcher.start()
    launcher.wait_for("run", "Running")
    (reaper,) = _reapers_of(process.pid)
    os.kill(reaper, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=100)
    until_none_is_left(launcher)


def _reapers_of(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"process_cleanup.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_a_killed_component_is_restarted_and_the_run_continues(launcher):
    process = launcher.start()
    os.kill(launcher.wait_for("trainer", "started")["pid"], signal.SIGKILL)
    launcher.wait_for("trainer", "started", count=2)
    os.kill(launcher.wait_for("coordinator", "started")["pid"], signal.SIGKILL)
    launcher.wait_for("coordinator", "started", count=2)
    launcher.answer(SUCCEEDED)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "trainer was killed by signal 9; restarting it" in out


def test_a_restarted_coordinator_has_the_same_port_also_in_a_later_run(launcher):
    launcher.answer(SUCCEEDED)
    assert launcher.run()[0] == 0
    ports = json.loads((launcher.directory / "ports.json").read_text())
    assert set(ports) == {"coordinator", "reward-exact"}
    assert launcher.run()[0] == 0
    assert json.loads((launcher.directory / "ports.json").read_text()) == ports


def test_a_component_that_rejects_its_configuration_ends_the_run(launcher):
    launcher.components["trainer"] = ["say", "there is no GPU here", "exit", "2"]
    code, _, err = launcher.run()
    assert code == 2
    assert err == (
        "rljob: trainer rejects its configuration; see the end of its log\n"
        f"{launcher.directory}/logs/trainer.log:\n  there is no GPU here\n"
    )


def test_a_rejected_run_with_a_checkpoint_cannot_restart_with_another_manifest(launcher):
    checkpoint = launcher.directory / "checkpoints/step-000002"
    launcher.components["trainer"] = ["make", str(checkpoint), "exit", "2"]
    assert launcher.run()[0] == 2
    launcher.components["trainer"] = ["wait"]
    launcher.answer(SUCCEEDED)
    code, out, _ = launcher.run()
    assert code == 0
    assert "resuming the run" in out
    assert checkpoint.exists()


def test_an_exit_after_the_failure_of_the_run_is_not_reported_as_the_cause(launcher):
    launcher.answer(status("Failed", reason="TrainerFailed", message="the loss of batch 3 is not finite"))
    launcher.components["trainer"] = ["exit", "2"]
    code, _, err = launcher.run()
    assert code == 1
    assert err.startswith("rljob: the run failed: the loss of batch 3 is not finite\n")
    assert not (launcher.directory / "refused").exists()


def test_a_run_rejected_at_its_start_may_restart_with_another_manifest(launcher):
    launcher.answer(status(step=0))
    launcher.components["trainer"] = ["say", "there is no GPU here", "exit", "2"]
    assert launcher.run()[0] == 2
    (launcher.directory / "ledger.sqlite").write_text("of the refused run")
    (launcher.directory / "run-id").write_text("of the refused run")
    (launcher.directory / "checkpoints/step-000000").mkdir(parents=True)
    launcher.components["trainer"] = ["wait"]
    launcher.answer(SUCCEEDED)
    launcher.program.write_text("#!/bin/sh\nrm -r $1; exec " + launcher.program.read_text().partition("exec ")[2])
    code, _, err = launcher.run("--set", "spec.seed=9")
    assert (code, err) == (0, "")
    assert not (launcher.directory / "ledger.sqlite").exists() and not (launcher.directory / "run-id").exists()
    assert not (launcher.directory / "checkpoints").exists()
    assert json.loads((launcher.directory / "job.json").read_text())["spec"]["seed"] == 9
    assert len([e for e in launcher.events() if e["subject"] == "initializer" and e["event"] == "started"]) == 2
    code, _, err = launcher.run("--set", "spec.seed=10")
    assert code == 2
    assert "spec.seed: the run in" in err


def test_a_component_that_exits_repeatedly_ends_the_run(launcher):
    launcher.manifest["spec"]["failurePolicy"] = {"maxRestarts": 2}
    launcher.components["runner"] = ["say", "Segmentation fault", "exit", "139"]
    code, _, err = launcher.run()
    assert code == 1
    assert "rljob: runner exited with code 139 and exceeded spec.failurePolicy.maxRestarts (2)\n" in err
    assert err.endswith("  Segmentation fault\n")


def test_a_failed_run_prints_the_cause_and_the_log_of_the_named_component(launcher):
    launcher.components["trainer"] = ["say", "loss is not finite", "wait"]
    process = launcher.start()
    log = launcher.directory / "logs/trainer.log"
    while not log.exists() or "waiting" not in log.read_text():
        time.sleep(0.005)
    launcher.answer(status("Failed", reason="TrainerFailed", message="the loss of batch 3 is not finite"))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err == (
        f"rljob: the run failed: the loss of batch 3 is not finite\n{log}:\n  loss is not finite\n  waiting\n"
    )


def test_one_directory_has_one_run_at_a_time(launcher):
    process = launcher.start()
    launcher.wait_for("run", "Running")
    code, _, err = launcher.run()
    assert code == 2
    assert err == f"rljob: {launcher.directory} is in use by another rljob run; wait for it or stop it\n"
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 130


def tree(path):
    return {
        str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(path.rglob("*")) if file.is_file()
    }


def test_a_manifest_of_another_run_is_rejected_and_nothing_is_overwritten(launcher):
    launcher.answer(SUCCEEDED)
    assert launcher.run()[0] == 0
    before = tree(launcher.directory)
    code, out, err = launcher.run("--set", "spec.seed=9")
    assert (code, out) == (2, "")
    assert err == (
        f"rljob: spec.seed: the run in {launcher.directory} was started with 0, not 9; give it that value, "
        "or choose another --run-dir\n"
    )
    assert tree(launcher.directory) == before


def test_an_invalid_manifest_starts_nothing(launcher):
    code, out, err = launcher.run("--set", "spec.training.steps=-1")
    assert (code, out) == (2, "")
    assert err == f"rljob: {launcher.file}: spec.training.steps: must be at least 0, not -1\n"
    assert not launcher.directory.exists()


def test_a_closed_output_ends_the_run_without_a_traceback(launcher):
    process = launcher.start()
    process.stdout.close()
    assert process.wait(timeout=100) == 1
    with process.stderr:
        assert process.stderr.read().startswith("rljob: the output was closed, so the run was stopped")
    until_none_is_left(launcher)


def test_a_status_survives_encoding_and_decoding():
    assert decode_status(encode_status(SUCCEEDED)) == SUCCEEDED
