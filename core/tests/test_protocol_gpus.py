"""The GPUs that a process may use: output of nvidia-smi, the driver's files, CUDA_VISIBLE_DEVICES."""

import pytest

from rljob.protocol import gpus
from rljob.protocol.gpus import Gpu, find_gpus, from_files, nothing_selected, parse_query, selection_problem, visible

QUERY = """\
0, GPU-11aa, 81559, NVIDIA H100 80GB HBM3
1, GPU-11bb, 81559, NVIDIA H100 80GB HBM3
2, GPU-22cc, [N/A], NVIDIA GB200, special
"""
MACHINE = parse_query(QUERY)


def test_the_output_of_nvidia_smi_is_read():
    assert MACHINE[1] == Gpu("1", 1, "GPU-11bb", 81559 << 20, "NVIDIA H100 80GB HBM3")
    assert MACHINE[2] == Gpu("2", 2, "GPU-22cc", 0, "NVIDIA GB200, special")
    assert parse_query("\n") == ()
    with pytest.raises(ValueError):
        parse_query("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver\n")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, [("0", 0), ("1", 1), ("2", 2)]),
        ("2, 0", [("2", 2), ("0", 0)]),
        ("GPU-22cc,GPU-11b", [("GPU-22cc", 2), ("GPU-11b", 1)]),
        ("1,GPU-11,2", [("1", 1)]),  # not unique
        ("1,7,0", [("1", 1)]),
        ("0,0", [("0", 0)]),
        ("-1", []),
        ("", []),
        ("MIG-5f,0", [("MIG-5f", -1), ("0", 0)]),
    ],
)
def test_the_variable_selects_as_cuda_does(value, found):
    selected = visible(MACHINE, value)
    assert [(gpu.visible_as, gpu.index) for gpu in selected] == found
    assert all(gpu.memory_bytes == MACHINE[gpu.index].memory_bytes for gpu in selected if gpu.index >= 0)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0,2,", ""),
        ("GPU-22, 0,MIG-5f", ""),
        ("99", "'99', which is none of the GPUs 0, 1, 2"),
        ("0,abc", "'abc', which is none of the GPUs 0, 1, 2"),
        ("-1", "'-1', which is none of the GPUs 0, 1, 2"),
        ("0,,1", "'', which is none of the GPUs 0, 1, 2"),
        ("GPU-33", "'GPU-33', which is none of the GPUs 0, 1, 2"),
        ("GPU-11", "'GPU-11', which is the beginning of several UUIDs"),
        ("0,0", "'0', a GPU that it names before"),
        ("0,GPU-11a", "'GPU-11a', a GPU that it names before"),
        ("MIG-5f,MIG-5f", "'MIG-5f', a GPU that it names before"),
    ],
)
def test_an_entry_that_names_no_gpu_or_one_again_is_found(value, problem):
    assert selection_problem(MACHINE, value) == problem
    assert problem or len(visible(MACHINE, value.rstrip(","))) == len(value.rstrip(",").split(","))


def test_a_uuid_passes_where_a_uuid_is_not_known():
    assert selection_problem((Gpu("0", 0),), "GPU-33") == ""
    assert selection_problem((Gpu("0", 0),), "1") == "'1', which is none of the GPUs 0"
    assert selection_problem((Gpu("GPU-22cc", 2, "GPU-22cc"),), "2") == ""


@pytest.mark.parametrize("value", ["9", "abc"])
def test_a_selection_of_no_gpu_is_said(value, monkeypatch):
    monkeypatch.setattr(gpus, "installed_gpus", lambda: MACHINE)
    sentence = f"CUDA_VISIBLE_DEVICES='{value}' selects none of the 3 GPUs of this machine, so none is used"
    assert nothing_selected({"CUDA_VISIBLE_DEVICES": value}) == sentence
    for hidden in ("", " ", "-1", "1"):
        assert nothing_selected({"CUDA_VISIBLE_DEVICES": hidden}) == ""
    assert nothing_selected({}) == ""
    monkeypatch.setattr(gpus, "installed_gpus", tuple)
    assert nothing_selected({"CUDA_VISIBLE_DEVICES": value}) == ""


def test_without_nvidia_smi_the_drivers_files_list_the_gpus(tmp_path, monkeypatch):
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidiactl").touch()
    assert from_files(driver, devices) == ()
    (devices / "nvidia3").touch()
    (devices / "nvidia5").touch()
    assert from_files(driver, devices) == (Gpu("0", 0), Gpu("1", 1))
    for address, minor, uuid in (
        ("0000:07:00.0", 5, "GPU-5e"),
        ("0000:0a:00.0", 3, "GPU-???"),
        ("0001:00:00.0", 4, ""),
    ):
        (driver / address).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA A10\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (driver / address / "information").write_text(text)
    # The third GPU belongs to another container: this one has no device node for it.
    assert from_files(driver, devices) == (
        Gpu("0", 0, "GPU-5e", 0, "NVIDIA A10"),
        Gpu("1", 1, "", 0, "NVIDIA A10"),
    )
    monkeypatch.setattr(gpus, "DRIVER", driver)
    monkeypatch.setattr(gpus, "DEVICES", devices)
    monkeypatch.setattr(gpus, "QUERY", (str(tmp_path / "nvidia-smi"),))
    assert [gpu.index for gpu in find_gpus({})] == [0, 1]
    assert [gpu.index for gpu in find_gpus({"CUDA_VISIBLE_DEVICES": "1"})] == [1]
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{QUERY}END\n")
    program.chmod(0o755)
    assert find_gpus({}) == MACHINE
    program.write_text("#!/bin/sh\necho broken; exit 9\n")
    assert [gpu.index for gpu in find_gpus({})] == [0, 1]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": " "}) == ()
