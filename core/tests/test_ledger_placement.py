"""The ledger in a directory of its own: places of its files, locks, and the moves that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rljob.ledger.ledger_placement import check_placement
from rljob.ledger.reader import LedgerReader
from rljob.ledger.store import StorageInUseError
from rljob.ledger.writer import LedgerWriter


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    path.mkdir()
    return path


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger's own directory, of which this process knows."""
    path = tmp_path / "ledger"
    path.mkdir()
    monkeypatch.setenv("RLJOB_LEDGER", str(path))
    return path


def run(storage: Path) -> None:
    """Start a run, as a coordinator does."""
    check_placement(storage)
    store = LedgerWriter(storage)
    store.record_job("sums", {})
    store._commit(store._queue)
    store.close()


def test_the_ledger_is_in_its_own_directory_and_the_payload_in_the_storage(storage: Path, volume: Path) -> None:
    run(storage)
    assert {path.name for path in volume.iterdir()} == {"ledger.sqlite", "ledger.lock"}
    assert {path.name for path in storage.iterdir()} == {"payload", "texts", "ledger.lock"}
    with LedgerReader(storage) as ledger:
        assert ledger.value("SELECT value FROM meta WHERE key = 'job'") == '{"name": "sums", "spec": {}}'
    run(storage)


def test_a_second_coordinator_is_refused_by_either_directory(
    storage: Path, volume: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = LedgerWriter(storage)
    (tmp_path / "other").mkdir()
    with pytest.raises(StorageInUseError, match=str(volume)):
        LedgerWriter(tmp_path / "other")
    monkeypatch.setenv("RLJOB_LEDGER", str(tmp_path / "other"))
    with pytest.raises(StorageInUseError, match=str(storage)):
        LedgerWriter(storage)
    store.close()
    LedgerWriter(storage).close()


def test_a_ledger_in_the_storage_is_not_moved_to_a_volume(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(storage)
    monkeypatch.setenv("RLJOB_LEDGER", str(tmp_path))
    with pytest.raises(ValueError, match=r"^spec\.storage\.ledger: the run in .* create the job without") as refusal:
        check_placement(storage)
    assert "\n" not in str(refusal.value)


def test_a_run_without_its_ledger_is_not_started_again(
    storage: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(storage)
    monkeypatch.delenv("RLJOB_LEDGER")
    with pytest.raises(
        ValueError, match=r"whose ledger is not in .*; create the job with spec\.storage\.ledger as before"
    ):
        check_placement(storage)
    monkeypatch.setenv("RLJOB_LEDGER", str(volume))
    (volume / "ledger.sqlite").unlink()
    with pytest.raises(ValueError, match=r"whose ledger is not in .*; restore the claim of spec\.storage\.ledger"):
        check_placement(storage)


def test_a_ledger_without_its_samples_is_refused(storage: Path, volume: Path) -> None:
    run(storage)
    shutil.rmtree(storage / "payload")
    with pytest.raises(ValueError, match="holds the ledger of a run whose samples are not in"):
        check_placement(storage)


def test_a_coordinator_killed_at_its_first_start_starts_again(storage: Path, volume: Path) -> None:
    (volume / "ledger.sqlite").touch()  # killed between the ledger's first byte and the payload's directory
    run(storage)
    (storage / "payload").rmdir()
    (volume / "ledger.sqlite").unlink()
    run(storage)
