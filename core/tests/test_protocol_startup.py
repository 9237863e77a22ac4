"""end_on_sigterm, lazy_imports and host_and_port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rljob.protocol.startup import end_on_sigterm, has_port, host_and_port, lazy_imports

LOADS = "{first}; print('loads', flush=True); import time; time.sleep(60)"
HANDLED = "from rljob.protocol.startup import end_on_sigterm; end_on_sigterm()"


def first_process(program):
    """Start ``program`` as the first process of a PID namespace."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _pending(pid):
    """Return the set of pending signals of a process and its first thread, as bits."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:")))


@pytest.mark.skipif(os.getuid() != 0, reason="a PID namespace needs root")
@pytest.mark.parametrize(("first", "ends"), [(HANDLED, True), ("pass", False)])
def test_the_first_process_of_a_container_ends_at_once_while_it_loads(first, ends):
    with first_process(LOADS.format(first=first)) as started:
        assert started.stdout.readline() == "loads\n"
        [child] = map(int, Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split())
        os.kill(child, signal.SIGTERM)
        if ends:
            assert started.wait(60) == 128 + signal.SIGTERM
        else:  # without a handler the signal is dropped, and it is not pending
            assert _pending(child) == 0
            os.kill(child, signal.SIGKILL)


def test_outside_pid_1_the_signal_handler_does_not_change():
    before = signal.getsignal(signal.SIGTERM)
    end_on_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that imports another library and uses it in a function. The other one counts its imports."""
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
    with lazy_imports("heavy_one"):
        import light_one
    assert sys.heavy_imports == 0 and "heavy_one" not in sys.modules
    assert light_one.use() == light_one.use() == 5
    import heavy_one

    assert sys.heavy_imports == 1 and heavy_one.x == 5


def test_a_loaded_module_is_not_replaced(library):
    import heavy_one

    with lazy_imports("heavy_one"):
        import light_one
    assert sys.modules["heavy_one"] is heavy_one and light_one.h is heavy_one


def test_a_missing_attribute_is_an_attribute_error(library):
    with lazy_imports("heavy_one"):
        import light_one
    with pytest.raises(AttributeError, match="heavy_one"):
        _ = light_one.h.y


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", "80")),
        (":8080", ("", "8080")),
        ("[::1]:8080", ("::1", "8080")),
        ("[::]:0", ("::", "0")),
        ("fd00::1", ("fd00::1", "")),
        ("[fd00::1]", ("fd00::1", "")),
        (
            "sums-trainer-1-0.sums-trainer.ns.svc.cluster.local",
            ("sums-trainer-1-0.sums-trainer.ns.svc.cluster.local", ""),
        ),
        ("first:29500", ("first", "29500")),
    ],
)
def test_an_address_is_split_into_host_and_port(address: str, parts: tuple[str, str]) -> None:
    assert host_and_port(address) == parts


@pytest.mark.parametrize("address", ["127.0.0.1:0", ":8080", "[::1]:65535", "localhost:1"])
def test_an_address_may_have_any_port(address: str) -> None:
    assert has_port(address)


@pytest.mark.parametrize(
    "address", ["here", "a:", "a:x", "a:65536", "a:-1", "[::1]", "a:\u0661", "a:²", "a:" + "1" * 5000]
)
def test_an_address_without_a_valid_port_has_none(address: str) -> None:
    assert not has_port(address)
