"""Every rendered role equals its golden file. core/tests/goldens.py has the command that updates the files."""

import pytest

from core.tests import goldens
from core.tests.goldens import DIRECTORY
from rljob.api.load import load

TEXTS = goldens.texts()


@pytest.mark.parametrize("name", TEXTS)
def test_a_rendered_role_equals_its_golden_file(name):
    assert (DIRECTORY / name).read_text() == TEXTS[name], "python -m core.tests.goldens --update updates the file"


def test_every_golden_file_belongs_to_a_role():
    found = {path.name for path in DIRECTORY.iterdir()}
    assert found == {*TEXTS, "job.yaml", "merge.yaml"}


def test_the_job_of_the_golden_files_is_valid():
    assert load(goldens.JOB).metadata.name == "sums"
