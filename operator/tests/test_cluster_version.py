"""The operator says whether it supports the version of its cluster."""

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest
import yaml

from rljob.kube.errors import UnavailableError
from rljob.operator.cluster_version import NEWEST, OLDEST, check_version, problem, read_version, text
from rljob.operator.metrics import Metrics
from tools.cluster import build

ROOT = Path(__file__).parents[2]


def answer(minor="36", name="v1.36.3", major="1"):
    return json.dumps({"major": major, "minor": minor, "gitVersion": name, "platform": "linux/amd64"}).encode()


@pytest.mark.parametrize(
    ("minor", "name", "expected"),
    [
        ("36", "v1.36.3", (1, 36)),
        ("33+", "v1.33.5-gke.1201000", (1, 33)),  # GKE and EKS append a plus sign
        ("34", "v1.34.2+k3s1", (1, 34)),
    ],
)
def test_the_version_of_the_api_server_is_read(minor, name, expected):
    assert read_version(answer(minor, name)) == (name, expected)


@pytest.mark.parametrize("wrong", [b"", b"{}", b"[]", answer(minor=""), answer(major="one")])
def test_another_answer_is_an_error(wrong):
    with pytest.raises(ValueError):
        read_version(wrong)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [((1, 32), "upgrade the cluster"), ((0, 40), "upgrade the cluster"), ((1, 38), "upgrade rljob"), ((2, 0), "rljob")],
)
def test_a_version_that_is_not_supported_has_a_sentence_with_the_remedy(version, remedy):
    sentence = problem("v9.9.9", version)
    assert sentence.startswith("Kubernetes v9.9.9 is not supported")
    assert sentence.endswith(remedy)


@pytest.mark.parametrize("version", [OLDEST, (1, 36), NEWEST])
def test_a_supported_version_has_none(version):
    assert problem("v1", version) == ""


class Client:
    """Answers with each of ``answers`` once, then never."""

    def __init__(self, *answers):
        self.answers = [*answers]
        self.empty = asyncio.Event()

    async def version(self):
        if not self.answers:
            self.empty.set()
            await asyncio.Event().wait()
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


async def checked(monkeypatch, *answers):
    """Return the values of the metric after these answers, by version."""
    monkeypatch.setattr("rljob.operator.cluster_version.CHECK_SECONDS", 0)
    monkeypatch.setattr("rljob.operator.cluster_version.RETRY_SECONDS", 0)
    client, metrics = Client(*answers), Metrics()
    task = asyncio.create_task(check_version(client, metrics.kubernetes_supported))
    await client.empty.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [family] = [each for each in metrics.registry.collect() if each.name.endswith("kubernetes_supported")]
    return {sample.labels["version"]: sample.value for sample in family.samples}


async def test_a_version_that_is_not_supported_is_logged_once(monkeypatch, caplog):
    assert await checked(monkeypatch, *[answer("99", "v1.99.0")] * 3) == {"v1.99.0": 0}
    [line] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.message == problem("v1.99.0", (1, 99))


async def test_after_an_upgrade_of_the_cluster_only_the_new_version_is_reported(monkeypatch):
    assert await checked(monkeypatch, answer(), answer("37", "v1.37.0")) == {"v1.37.0": 1}


async def test_an_api_server_that_does_not_answer_is_asked_again(monkeypatch, caplog):
    assert await checked(monkeypatch, UnavailableError(0, "", "no answer"), b"<html>", answer()) == {"v1.36.3": 1}
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 2


def test_tests_charts_and_page_name_the_same_versions():
    assert (text(OLDEST), text(NEWEST)) == build.OTHER_VERSIONS
    for chart in ("rljob", "rljob-crds"):
        found = yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())
        assert found["kubeVersion"] == f">={text(OLDEST)}.0-0"
    page = (ROOT / "docs/operations/versions.md").read_text()
    assert re.search(rf"Kubernetes {text(OLDEST)} to {text(NEWEST)}\b", page)
    assert f"| {text(OLDEST)} |" in page and f"| {text(NEWEST)} |" in page
