"""The HTTP API of the ledger returns the same data as the commands, and nothing outside the storage."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import blake3
import httpx
import msgspec
import pytest
from fastapi import FastAPI
from ledgers import alter, ask, batch_of, copy, write_checkpoint
from world import World, job

from rljob.coordinator import ledger_api
from rljob.coordinator.ledger_api import add_ledger_api
from rljob.coordinator.local_api_server import LocalApiServer, build_local_api
from rljob.coordinator.metrics import REGISTRY
from rljob.coordinator.routes import build_app
from rljob.ledger.audit import Report, audit
from rljob.ledger.reader import LedgerReader, kept_checkpoints
from rljob.ledger.sample_detail import SampleDetail, show
from rljob.protocol.run_status import NOTE_HEADER, decode_note

HEADER = b'{"w": {"dtype": "F32", "shape": [320000], "data_offsets": [0, 1280000]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 5000
MODEL = {"config.json": b"{}", "model.safetensors": WEIGHTS}


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a run that tests may change; its newest checkpoint has a model."""
    storage = copy(finished_run, tmp_path / "run")
    digest = write_checkpoint(storage / "checkpoints" / "step-000006", 6, 2, MODEL)
    alter(storage, f"UPDATE checkpoints SET digest = '{digest}' WHERE step = 6")
    return storage


@pytest.fixture
async def client(run: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    add_ledger_api(app, run)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://coordinator") as client:
        yield client


async def test_an_audit_equals_that_of_the_command(client: httpx.AsyncClient, run: Path) -> None:
    answer = await client.get("/v1/audit")
    assert msgspec.json.decode(answer.content, type=Report) == audit(run)
    assert answer.status_code == 200 and answer.json()["ok"]


async def test_a_sample_equals_that_of_the_command(client: httpx.AsyncClient, run: Path) -> None:
    name = batch_of(run, 5)[0]
    answer = await client.get(f"/v1/samples/{name}")
    with LedgerReader(run) as ledger:
        assert msgspec.json.decode(answer.content, type=SampleDetail) == show(ledger, name)


async def test_an_unknown_sample_gives_an_error_message(client: httpx.AsyncClient) -> None:
    found = (await client.get("/v1/samples/g999.0")).json()
    assert found["error"].startswith("there is no sample 'g999.0'; the newest is g")
    found = (await client.get("/v1/samples/--help")).json()
    assert found == {"error": "'--help' is not a sample id; ids are like g17.3, or e40.7.0 in an evaluation"}


async def test_an_empty_list_has_a_reason_and_an_unknown_task_an_error(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/samples?task=products")
    assert answer.status_code == 404
    assert answer.json() == {"detail": "there is no task 'products'; the tasks of this run are sums"}
    answer = await client.get("/v1/samples?step=999")
    assert answer.json() == [] and answer.headers[NOTE_HEADER] == "there is no batch 999 yet; the newest is 5"
    assert NOTE_HEADER not in (await client.get("/v1/samples?limit=1")).headers


async def test_failed_samples_have_a_note_with_their_share_and_the_last_reason(
    client: httpx.AsyncClient, run: Path
) -> None:
    alter(run, "UPDATE samples SET reason = 'no\n😀 100 %: é' WHERE id = 'g5.1'")
    ((failed, ended),) = ask(run, "SELECT TOTAL(state = 'failed'), COUNT(*) FROM samples")
    answer = await client.get("/v1/samples?state=failed&limit=1")
    assert len(answer.json()) == 1 and answer.headers[NOTE_HEADER].isascii()
    assert decode_note(answer.headers[NOTE_HEADER]) == (
        f"1 of {failed:.0f} failed samples ({100 * failed / ended:.0f} % of the {ended} that have ended),"
        rf" last: no\n😀 100 %: é; --limit {failed:.0f} lists all"
    )


async def test_a_model_is_fetched_file_by_file_from_an_offset(client: httpx.AsyncClient, run: Path) -> None:
    (run / "checkpoints" / "step-000006" / "notes.txt").write_text("not the trainer's")
    (newest,) = (each for each in (await client.get("/v1/checkpoints")).json() if each["step"] == 6)
    assert newest["digests"] == {name: blake3.blake3(data).hexdigest() for name, data in MODEL.items()}
    assert newest["files"] == {name: len(data) for name, data in MODEL.items()}, "all files except the trainer's state"
    whole = await client.get("/v1/checkpoints/6/model.safetensors")
    assert whole.content == MODEL["model.safetensors"] and int(whole.headers["content-length"]) == len(whole.content)
    rest = await client.get("/v1/checkpoints/6/model.safetensors?offset=1279000")
    assert rest.content == MODEL["model.safetensors"][1279000:]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/checkpoints/6/trainer.json",
        "/v1/checkpoints/6/none",
        "/v1/checkpoints/5/config.json",
        "/v1/checkpoints/6/config.json?offset=3",
        "/v1/checkpoints/6/..%2F..%2Fjob.json",
        "/v1/checkpoints/6/%2Fetc%2Fpasswd",
        "/v1/checkpoints/6/%2E%2E",
    ],
)
async def test_nothing_but_the_files_of_kept_models_can_be_read(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize(
    "damage, sentence",
    {
        "overwritten": ("trainer.json is damaged (", []),
        "missing": ("trainer.json is missing", []),
        "of another run": ("trainer.json does not have the digest in the ledger", []),
        "without weights": ("", ["config.json"]),
    }.items(),
)
async def test_a_damaged_checkpoint_says_so(
    client: httpx.AsyncClient, run: Path, damage: str, sentence: tuple[str, list[str]]
) -> None:
    newest = run / "checkpoints" / "step-000006"
    match damage:
        case "overwritten":
            (newest / "trainer.json").write_text("{}")
        case "missing":
            (newest / "trainer.json").unlink()
        case "of another run":
            write_checkpoint(newest, 6, 3, MODEL)
        case "without weights":
            (newest / "model.safetensors").unlink()
    (found,) = (each for each in (await client.get("/v1/checkpoints")).json() if each["step"] == 6)
    begin, files = sentence
    assert found["damage"].startswith(begin) and bool(found["damage"]) == bool(begin)
    assert list(found["files"]) == files
    assert set(found["digests"]) == (set() if begin else set(MODEL)), "so that the client misses the weights"
    assert (await client.get("/v1/checkpoints/6/config.json")).status_code == (404 if begin else 200)


async def test_a_checkpoint_that_is_not_in_the_storage_has_the_digest_of_its_record(
    client: httpx.AsyncClient, run: Path
) -> None:
    """It may be in S3."""
    (run / "checkpoints" / "step-000006").rename(run / "elsewhere")
    (found,) = (each for each in (await client.get("/v1/checkpoints")).json() if each["step"] == 6)
    with LedgerReader(run) as ledger:
        digest = next(kept.digest for kept in kept_checkpoints(ledger) if kept.step == 6)
    assert (found["files"], found["digests"], found["damage"], found["record"]) == ({}, {}, "", digest)
    assert (await client.get("/v1/checkpoints/6/config.json")).status_code == 404


async def test_symbolic_links_in_the_storage_are_not_followed(
    client: httpx.AsyncClient, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokens.json").write_text("secret")
    newest = run / "checkpoints" / "step-000006"
    (newest / "tokens.json").symlink_to(tmp_path / "tokens" / "tokens.json")
    kept = {each["step"]: each["files"] for each in (await client.get("/v1/checkpoints")).json()}
    assert set(kept[6]) == set(MODEL)
    assert (await client.get("/v1/checkpoints/6/tokens.json")).status_code == 404
    newest.rename(run / "elsewhere")
    newest.symlink_to(tmp_path / "tokens")
    assert 6 not in {each["step"] for each in (await client.get("/v1/checkpoints")).json()}
    assert (await client.get("/v1/checkpoints/6/tokens.json")).status_code == 404


@pytest.mark.parametrize("path", ["/etc", "../tokens", "checkpoints/../../tokens", ""])
async def test_a_checkpoint_path_outside_the_storage_is_ignored(
    client: httpx.AsyncClient, run: Path, tmp_path: Path, path: str
) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokens.json").write_text("secret")
    alter(run, f"UPDATE checkpoints SET path = '{path}' WHERE step = 6")
    assert 6 not in {each["step"] for each in (await client.get("/v1/checkpoints")).json()}
    for name in ("tokens.json", "passwd"):
        assert (await client.get(f"/v1/checkpoints/6/{name}")).status_code == 404


async def test_prompts_responses_and_weights_are_not_served_to_the_network(tmp_path: Path) -> None:
    world = World(job(), tmp_path)
    await world.start()
    known = set(REGISTRY._collector_to_names)
    network, local = build_app(world.run, {}), build_local_api(world.run)
    for collector in set(REGISTRY._collector_to_names) - known:
        REGISTRY.unregister(collector)
    world.close()
    assert {route.path for route in network.routes if "v1" in route.path} == {
        *("/v1/connect/{role}", "/v1/batches/{step}/shard", "/v1/status", "/v1/suspend")
    }
    assert {"/v1/status", "/v1/audit", "/v1/samples", "/v1/checkpoints"} <= {route.path for route in local.routes}


async def test_the_local_api_listens_on_loopback_only_and_a_used_port_does_not_end_the_run(tmp_path: Path) -> None:
    world = World(job(), tmp_path)
    await world.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        await LocalApiServer(world.run).listen(taken.getsockname()[1])
        port = taken.getsockname()[1]
    readers = LocalApiServer(world.run)
    serving = asyncio.create_task(readers.listen(port))
    while not readers.started:
        await asyncio.sleep(0)
    assert [each.getsockname() for server in readers.servers for each in server.sockets] == [("127.0.0.1", port)]
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/v1/status")).json()["state"] == "Starting"
    readers.should_exit = True
    await serving
    world.close()


async def test_a_slow_query_sends_spaces_and_is_killed_when_its_client_disconnects(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(ledger_api, "KEEPALIVE_SECONDS", 0.001)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(600)'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started = []
    spawn = asyncio.create_subprocess_exec

    async def remember(*arguments: Any, **options: Any) -> Any:
        started.append(await spawn(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remember)
    report = ledger_api._report(asyncio.Semaphore(1), "audit", str(tmp_path))
    pieces = [await anext(report) for _ in range(3)]
    while not started:
        pieces.append(await anext(report))
    assert set(pieces) == {b" "}
    await report.aclose()  # type: ignore[attr-defined]
    assert await asyncio.wait_for(started[0].wait(), 60) == -9


async def test_a_query_that_crashes_gives_an_error_message(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pieces = [piece async for piece in ledger_api._report(asyncio.Semaphore(1), "audit", str(tmp_path))]
    assert json.loads(b"".join(pieces)) == {
        "error": "the query exited with code 1; the coordinator's log has the cause"
    }
