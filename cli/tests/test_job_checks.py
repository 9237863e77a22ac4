"""Each component checks itself in its planned environment; its log lines are not problems."""

from __future__ import annotations

import pytest

from rljob.api.load import validate
from rljob.api.resolve import resolve
from rljob.local import job_checks
from rljob.local.errors import CliError

LOUD = "import logging, sys\nlogging.warning('loaded')\nprint('hello', file=sys.stderr)\n"


@pytest.fixture
def acme(tmp_path):
    """A directory with a package, as env of a template."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "acme_code.py").write_text(f"{LOUD}def usable():\n    pass\n")
    main = {"name": "main", "env": [{"name": "PYTHONPATH", "value": str(tmp_path / "acme")}]}
    return {"spec": {"containers": [main]}}


@pytest.fixture
def check(manifest, tmp_path, monkeypatch):
    """Return a function: fields of the trainer → the problems that its check finds."""
    monkeypatch.setattr(job_checks, "CHECKED_COMPONENTS", ("trainer",))

    def check(**trainer):
        manifest["spec"]["models"][0]["source"] = "job://later"
        manifest["spec"]["trainer"] = {"backend": "acme_code:usable", **trainer}
        return job_checks.check_components(resolve(validate(manifest)), tmp_path)

    return check


def test_a_package_on_the_path_of_a_template_is_found(check, acme):
    assert check(template=acme) == []
    (problem,) = check()
    assert problem.startswith("spec.trainer.backend: module acme_code cannot be imported")


def test_lines_that_a_user_s_module_writes_are_no_problems(check, acme):
    assert [problem.partition(":")[0] for problem in check(template=acme, backend="acme_code:nothing")] == [
        "spec.trainer.backend"
    ]


def test_a_check_that_ends_without_a_report_is_no_success(check, acme, tmp_path):
    (tmp_path / "acme" / "acme_code.py").write_text(f"{LOUD}import os\nos._exit(0)\n")
    with pytest.raises(CliError, match="trainer could not be checked") as caught:
        check(template=acme)
    assert "hello" in caught.value.log


def test_pools_and_rewards_with_different_environments_are_checked_one_by_one(manifest, tmp_path, acme):
    spec = manifest["spec"]
    spec["rollouts"] = [{"name": "main", "replicas": {"min": 2}}, {"name": "other"}]
    spec["rewards"].append({"name": "own", "function": "acme_code:usable"})
    spec["tasks"][0]["reward"] = "own"

    def planned():
        checks = job_checks._planned_checks(resolve(validate(manifest)), tmp_path)
        return [(component, environment.get("RLJOB_NAME")) for component, environment in checks]

    assert planned() == [("trainer", None), ("rollout", None), ("runner", None), ("rewards", None)]
    spec["environments"] = [{"name": "lake", "builtin": "frozen_lake"}]
    assert ("environments", None) not in planned(), "validation has checked all of it"
    spec["environments"].append({"name": "gym", "builtin": "reasoning_gym", "config": {"dataset": "chain_sum"}})
    assert planned()[-1] == ("environments", None), "its package is needed"
    del spec["environments"]
    spec["rollouts"][1]["template"] = acme
    assert planned() == [
        ("trainer", None),
        ("rollout", "main"),
        ("rollout", "other"),
        ("runner", None),
        ("rewards", None),
    ]
