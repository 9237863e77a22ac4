"""The transport that NCCL chose is read from its log. The lines are those of NCCL's source; the tests have no GPU."""

import os

import pytest

from rljob.transfer.nccl_log import NcclLog, summarize

LINES = """\
gpu-1:71:90 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
gpu-1:71:90 [0] NCCL INFO Using network Socket
gpu-1:71:90 [0] NCCL INFO Channel 00/24 : 0 1
gpu-1:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu-1:71:90 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu-1:71:90 [0] NCCL INFO Channel 02 : 0[0] -> 1[1] via SHM/direct/direct
gpu-1:71:90 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/IB/3/GDRDMA
gpu-1:71:90 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[0] [send] via NET/Socket/0
"""


def test_the_transports_are_counted():
    expected = "NET/IB/GDRDMA (1 channels), NET/Socket (1 channels), P2P/CUMEM (2 channels), SHM (1 channels)"
    assert summarize(LINES) == expected
    assert summarize("") == "not known from its log"


def test_the_log_of_a_process_is_read_once_for_each_group(tmp_path):
    environment: dict[str, str] = {}
    log = NcclLog(environment, tmp_path)
    log.start()
    log.start()
    path = tmp_path / f"rljob-nccl-{os.getpid()}.log"
    assert environment == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(path)}
    assert log.transports() == f"not known: NCCL wrote no log to {path}"
    first, rest = LINES.splitlines(keepends=True)[3], LINES.splitlines(keepends=True)[5]
    with path.open("w") as file:
        file.write(first)
        file.flush()
        assert log.transports() == "P2P/CUMEM (1 channels)"
        assert not path.exists()
        file.write(rest)
        file.flush()
        assert log.transports() == "SHM (1 channels)"
        assert log._file is not None
        log._file.close()


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
def test_a_users_setting_stays(tmp_path, name):
    environment = {name: "x"}
    log = NcclLog(environment, tmp_path)
    log.start()
    assert environment == {name: "x"}
    assert log.transports() == f"see the log of NCCL (set by the user: {name})"
