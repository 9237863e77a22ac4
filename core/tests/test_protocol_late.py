"""Modules that are imported when they are used first."""

import sys

import pytest

from rljob.protocol.late import imported_late


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that imports another, which says so, and uses it in a function."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "heavy_one.py").write_text(
        "import sys\nsys.heavy_imports = getattr(sys, 'heavy_imports', 0) + 1\nx = 5\n"
    )
    (tmp_path / "light_one.py").write_text("import heavy_one as h\ndef use():\n    return h.x\n")
    monkeypatch.setattr(sys, "heavy_imports", 0, raising=False)
    yield
    for name in ("heavy_one", "light_one"):
        sys.modules.pop(name, None)


def test_a_module_is_imported_once_when_it_is_used_first(library):
    with imported_late("heavy_one"):
        import light_one
    assert sys.heavy_imports == 0 and "heavy_one" not in sys.modules
    assert light_one.use() == light_one.use() == 5
    import heavy_one

    assert sys.heavy_imports == 1 and heavy_one.x == 5


def test_what_is_there_already_stays(library):
    import heavy_one

    with imported_late("heavy_one"):
        import light_one
    assert sys.modules["heavy_one"] is heavy_one and light_one.h is heavy_one


def test_what_it_has_not_is_an_attribute_error(library):
    with imported_late("heavy_one"):
        import light_one
    with pytest.raises(AttributeError, match="heavy_one"):
        _ = light_one.h.y
