"""Every role is rendered as its golden file says (core/tests/goldens.py tells how to write them anew)."""

import pytest

from core.tests import goldens
from core.tests.goldens import DIRECTORY
from rljob.api.load import load

TEXTS = goldens.texts()


@pytest.mark.parametrize("name", TEXTS)
def test_a_role_is_rendered_as_its_golden_file_says(name):
    assert (DIRECTORY / name).read_text() == TEXTS[name], "python -m core.tests.goldens --update writes it anew"


def test_there_is_no_golden_file_of_nothing():
    found = {path.name for path in DIRECTORY.iterdir()}
    assert found == {*TEXTS, "job.yaml", "merge.yaml"}


def test_the_job_of_the_golden_files_is_valid():
    assert load(goldens.JOB).metadata.name == "sums"
