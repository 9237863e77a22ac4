"""Extension points: names, references, and loading of implementations."""

from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from rljob.api.extensions import MAX_LENGTH, Extension, load

ENGINES = {"vllm": "a:b", "Torch": "c:d"}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("VLLM", "must be 'vllm' or 'Torch' or module:attribute of your own package, not 'VLLM'; did you mean vllm?"),
        ("torhc", "; did you mean Torch?"),
        ("a:" + "b" * MAX_LENGTH, "must have at most 253 characters, not 255: 'a:bbbb"),
        ("é\n" * 100, "not 'é\\né"),
    ],
)
def test_a_wrong_value_has_a_sentence_of_one_line_and_of_limited_length(value, sentence):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Annotated[str, Extension(ENGINES)]).validate_python(value)
    message = caught.value.errors()[0]["msg"]
    assert sentence in message
    assert len(message) < 180 and message.isprintable()


def test_a_module_that_ends_with_sys_exit_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "script_without_guard.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^spec\.x: module script_without_guard cannot be imported \(SystemExit: 0\)"):
        load({}, "script_without_guard:main", "spec.x")


@pytest.mark.parametrize("raised", ["RuntimeError", "ImportError", "SystemExit"])
def test_an_attribute_that_raises_an_exception_is_a_sentence(tmp_path, monkeypatch, raised):
    module = f"lazy_attributes_{raised.lower()}"
    (tmp_path / f"{module}.py").write_text(f"def __getattr__(name):\n    raise {raised}('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = rf"^spec\.x: attribute main of module {module} cannot be read \({raised}: boom\); correct the module$"
    with pytest.raises(ValueError, match=sentence) as caught:
        load({}, f"{module}:main", "spec.x")
    assert type(caught.value.__cause__).__name__ == raised
