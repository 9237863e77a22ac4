"""The operator scale benchmark: growth, targets, plot, profile, and its command line."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.operator_audit import Write
from benchmarks.operator_scale import code_digest, parse_sizes
from benchmarks.operator_scale_figures import growth, targets_of
from benchmarks.operator_scale_phases import EDITS, edits_of, surplus
from benchmarks.operator_scale_plot import plot
from benchmarks.operator_scale_profile import package_of, summary
from benchmarks.operator_scale_usage import busy, histogram_mean, operator_requests, report_of


def size(jobs: int, seconds: float, **cpu: float) -> dict:
    """Return figures of a size; ``cpu``: process → CPU seconds per job."""
    edits = {"p50_s": 0.1, "p99_s": 0.3, "max_s": 0.3, "unanswered": 0}
    return {
        "jobs": jobs,
        "pods": 16 * jobs,
        "created": {
            "running_s": seconds,
            "last_child_s": seconds / 2,
            "busy": 0.9,
            "machine_busy": 0.95,
            "cpu_seconds_per_job": {"operator": 0.5, "apiserver": 1.0, "etcd": 0.2, "benchmark": 0.1} | cpu,
            "operator": {"writes_per_job": 30.0},
        },
        "resident_mib": {"operator": 100.0, "apiserver": 400.0, "etcd": 90.0},
        "rest": {"writes_per_minute": 0.0},
        "edits": edits,
        "edits_while_reporting": edits,
        "kills": edits,
        "restart": {"surplus_writes": 0, "converged_s": 5.0},
        "operator_peak_mib": 120.0,
    }


def test_growth_names_the_process_whose_cpu_time_per_job_increases_most():
    sizes = [size(10, 10.0), size(100, 100.0), size(1000, 10_000.0, operator=0.6, apiserver=1.3, benchmark=9.0)]
    found = growth(sizes)
    assert found["exponent"] == {"10-100": 1.0, "100-1000": 2.0}
    assert found["cpu_seconds_per_job"]["apiserver"] == [1.0, 1.3]
    assert found["bends"] == {"process": "apiserver", "share": 0.75}
    assert sum(found["share_at_largest"].values()) == pytest.approx(1.0, abs=0.01)


def test_less_than_a_tenth_of_the_cpu_time_of_all_processes_is_no_bend():
    for etcd, bends in ((0.1, None), (0.2, None), (0.36, None), (0.38, {"process": "etcd", "share": 1.0})):
        assert growth([size(10, 10.0), size(30, 30.0, etcd=etcd)])["bends"] == bends


def test_the_targets_are_about_one_job_and_need_no_second_size():
    assert all(target["holds"] for target in targets_of([size(10, 1.0)]).values())
    slow = targets_of([size(10, 1.0), size(100, 10.0, operator=0.8)])
    assert [name for name, target in slow.items() if not target["holds"]] == ["operator_cpu_per_job_growth"]
    noisy = size(100, 10.0)
    noisy["restart"] = {"surplus_writes": 1, "converged_s": 61.0}
    noisy["created"]["operator"]["writes_per_job"] = 37.0
    missed = {name for name, target in targets_of([size(10, 1.0), noisy]).items() if not target["holds"]}
    assert missed == {"surplus_writes_after_restart", "restart_converged_s", "operator_writes_per_job_growth"}


def test_the_same_sizes_give_the_same_plot(tmp_path):
    sizes = [size(10, 10.0), size(30, 40.0)]
    plot(sizes, tmp_path / "one.svg")
    plot(sizes, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "until all jobs run" in text and "benchmark" not in text


def test_sizes_are_different_positive_numbers():
    assert parse_sizes("30,10,30") == [10, 30]
    for wrong in ("0", "ten", "10,", "-1", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number of at least 1"):
            parse_sizes(wrong)


def test_finished_sizes_depend_on_all_code_that_is_measured(monkeypatch, tmp_path):
    for file in ("operator/src/rljob/operator/a.py", "core/src/rljob/b.py", "benchmarks/operator_scale_plot.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    monkeypatch.setattr("benchmarks.operator_scale.ROOT", tmp_path)
    before = code_digest()
    (tmp_path / "benchmarks/operator_scale_plot.py").write_text("2")
    assert code_digest() == before
    (tmp_path / "core/src/rljob/b.py").write_text("2")
    assert code_digest() != before


@pytest.mark.parametrize("jobs", [1, 10, 50, 1000])
def test_edits_are_different_and_spread_over_the_jobs(jobs):
    edits = edits_of(jobs, 16, "quiet")
    texts = {patch["spec"]["runner"]["template"]["metadata"]["annotations"]["bench"] for _, patch in edits}
    assert len(edits) == len(texts) == min(2 * jobs, EDITS)
    edited = sorted({job for job, _ in edits})
    assert edited == [n * jobs // min(jobs, EDITS) for n in range(min(jobs, EDITS))]
    assert edited[-1] >= jobs * 0.98 - 1


def write(resource: str, name: str, where: str = "bench-00", subresource: str = "") -> Write:
    return Write("patch", resource, subresource, where, name, 200, received=1.0, answered=1.25)


def test_writes_to_jobs_that_were_not_changed_are_surplus():
    own = [write("rljobs", "job-001", subresource="status"), write("deployments", "job-001-runner")]
    others = [write("deployments", "job-002-runner"), write("deployments", "job-001-runner", "bench-01")]
    others.append(write("rljobs", "job-0011"))
    assert surplus([*own, write("events", "any"), *others], [1]) == others


def test_requests_are_counted_by_job_and_failures_by_code():
    metrics = {
        'rljob_operator_api_requests_total{code="201",verb="create"}': 40.0,
        'rljob_operator_api_requests_total{code="409",verb="create"}': 2.0,
        'rljob_operator_api_requests_created{code="201",verb="create"}': 1.8e9,
        'rljob_operator_reconcile_seconds_count{result="done"}': 8.0,
        'rljob_operator_reconcile_seconds_sum{result="done"}': 2.0,
    }
    assert operator_requests(metrics) == {"create 201": 40, "create 409": 2}
    found = report_of(metrics, [write("rljobs", "job-001")], 2)
    assert found["requests_per_job"] == 21.0 and found["requests_per_job_by_verb"] == {"create": 21.0}
    assert found["requests_without_success"] == {"create 409": 2}
    assert (found["reconciles_per_job"], found["reconcile_mean_s"]) == (4.0, 0.25)
    assert found["time_of_writes_in_api_server"] == {"p50_s": 0.25, "p99_s": 0.25}
    assert histogram_mean({}, "any") == 0.0


def test_busy_is_a_share_of_all_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert busy({"operator": 5.0, "etcd": 10.0}, 10.0) == 0.75


def test_a_profile_is_summed_by_package_without_waiting():
    found = summary(
        {
            ("~", 0, "<method 'poll' of 'select.epoll' objects>"): 100.0,
            ("/x/operator/src/rljob/operator/planning/scale.py", 3, "plan"): 3.0,
            ("/x/operator/src/rljob/operator/cache.py", 3, "put"): 1.0,
            ("/x/lib/python3.11/site-packages/kopf/a.py", 9, "copy"): 4.0,
            ("/x/lib/python3.11/json/decoder.py", 9, "decode"): 2.0,
        }
    )
    assert found["seconds"] == 10.0
    assert found["packages"] == {"kopf": 0.4, "rljob.operator.planning": 0.3, "json": 0.2, "rljob.operator": 0.1}
    assert next(iter(found["functions"])) == "kopf copy"
    assert package_of(("~", 0, "<built-in method f>")) == "built-in"
    assert package_of(("<frozen importlib._bootstrap>", 1, "f")) == "import"
