"""Extension points: loading what a field of the manifest names."""

import pytest

from rljob.api.extensions import load


def test_a_module_that_ends_with_sys_exit_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "script_without_guard.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^spec\.x: module script_without_guard cannot be imported \(SystemExit: 0\)"):
        load({}, "script_without_guard:main", "spec.x")
