"""The handlers of kopf delegate to the operator: events enqueue keys, logins read the credentials again."""

import asyncio
import logging
import types

import click
import kopf
import pytest

from rljob.kube.access import Access
from rljob.operator import handlers
from rljob.operator.admission_server import AdmissionServer
from rljob.operator.config import CONFIG, OperatorSettings, Start, start_of
from rljob.operator.lease import LeaseLostError
from rljob.operator.service import Service


def service(tmp_path, ended=lambda: None):
    (tmp_path / "token").write_text("old")
    access = Access("http://127.0.0.1:1", token_file=tmp_path / "token")
    settings = OperatorSettings.model_validate({"listen": "127.0.0.1:0"}, by_alias=True)
    return Service(Start(settings, access, "system", "me"), ended)


def event(kind, version, **meta):
    metadata = {"namespace": "team", "name": "sums", "uid": "u", "resourceVersion": str(version), **meta}
    return {"type": kind, "object": {"metadata": metadata, "spec": {"seed": 1}, "status": {"release": "1"}}}


async def test_an_event_stores_the_rljob_and_enqueues_its_key(tmp_path):
    memo = types.SimpleNamespace(rljob=service(tmp_path))
    operator = memo.rljob.operator
    for each, queued in ((event(None, 5, generation=1), 1), (event("MODIFIED", 4), 0), (event("DELETED", 6), 1)):
        await handlers.take(event=each, memo=memo)
        assert len(operator.queue) == queued
        if queued:
            key, _ = await operator.queue.get()
            assert key == ("team", "sums")
            operator.queue.done(key)
        if each["type"] != "DELETED":
            assert bytes(operator.caches.jobs.find("team", "sums").spec) == b'{"seed":1}'
    assert operator.caches.jobs.find("team", "sums") is None


async def test_a_login_after_a_rejection_reads_the_token_again(tmp_path):
    memo = types.SimpleNamespace(rljob=service(tmp_path))
    for token in ("old", "new"):
        (tmp_path / "token").write_text(token)
        found = await handlers.login(memo=memo)
        assert found.server == "http://127.0.0.1:1"
        assert memo.rljob.access.headers() == {"Authorization": f"Bearer {token}"}
        await found.aiohttp_session.close()


async def test_an_operator_that_lost_its_lease_ends_the_process_with_an_error(tmp_path, monkeypatch):
    ended = asyncio.Event()
    running = service(tmp_path, ended.set)

    async def lost(stop):
        raise LeaseLostError("the lease could not be renewed in time")

    monkeypatch.setattr(running.operator, "run", lost)
    await running.begin()
    await ended.wait()
    with pytest.raises(kopf.PermanentError, match="the lease could not be renewed"):
        await handlers.stop(memo=types.SimpleNamespace(rljob=running))


async def test_an_operator_that_is_stopped_ends_without_an_error(tmp_path, monkeypatch):
    running = service(tmp_path, lambda: pytest.fail("it was not stopped"))

    async def runs(stop):
        await stop.wait()

    monkeypatch.setattr(running.operator, "run", runs)
    await running.begin()
    await handlers.stop(memo=types.SimpleNamespace(rljob=running))


def test_the_namespaces_are_those_of_the_command(monkeypatch, tmp_path):
    assert handlers._option("namespaces") is None
    with click.Context(click.Command("run")) as context:
        context.params = {"namespaces": ("a", "b"), "clusterwide": False}
        assert handlers._option("namespaces") == ("a", "b")
    monkeypatch.delenv(CONFIG, raising=False)
    monkeypatch.setattr("rljob.operator.config.in_cluster", lambda: Access("http://k:1"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert start_of(("a", "b")).settings.namespaces == ["a", "b"]
    (tmp_path / "operator.yaml").write_text("namespaces: [a]")
    monkeypatch.setenv(CONFIG, str(tmp_path / "operator.yaml"))
    assert start_of().settings.namespaces == start_of(("a",)).settings.namespaces == ["a"]
    with pytest.raises(ValueError, match="namespaces: kopf watches other namespaces: run kopf with -n a"):
        start_of(())


def test_kopf_logs_no_line_for_every_event(caplog):
    settings = kopf.OperatorSettings()
    handlers._configure(settings)
    log = logging.getLogger("kopf.objects")
    try:
        with caplog.at_level(logging.INFO, "kopf.objects"):
            log.info("Handler 'rljob' succeeded.")
            log.info("Handler 'acme' succeeded.")
            log.error("Handler 'rljob' failed.")
            log.info("Handler 'validate' succeeded.")
            log.error("Handler 'validate' failed permanently: spec.seed: must be a whole number")
        assert [record.getMessage() for record in caplog.records] == [
            "Handler 'acme' succeeded.",
            "Handler 'rljob' failed.",
        ]
    finally:
        log.removeFilter(handlers._is_worth_a_line)
        logging.getLogger("kopf.activities.probe").setLevel(logging.NOTSET)
    assert settings.scanning.disabled and settings.peering.standalone and not settings.posting.enabled
    assert settings.watching.chunk_size == 500


def test_what_kopf_compares_is_found_without_copies_of_what_is_large():
    settings = kopf.OperatorSettings()
    plain, plain_progress = settings.persistence.diffbase_storage, settings.persistence.progress_storage
    handlers._configure(settings)
    storage, progress = settings.persistence.diffbase_storage, settings.persistence.progress_storage
    assert settings.persistence.finalizer == "rljob.dev/unused"
    status = {"run": {"step": 5}, "kopf": {"progress": {"acme": {}}}}
    for annotations in ({}, {"note": "x", "kopf.zalando.org/acme": "{}"}):
        metadata = {"name": "sums", "labels": {"team": "a"}, "annotations": annotations, "managedFields": [{}]}
        body = kopf.Body({"kind": "RLJob", "metadata": metadata, "spec": {"seed": 1}, "status": status})
        for fields in (None, [], ["status.run.step"], ["status.kopf"], ["metadata.managedFields"]):
            essence = storage.build(body=body, extra_fields=fields)
            assert essence == plain.build(body=body, extra_fields=fields)
            assert progress.clear(essence=essence) == plain_progress.clear(essence=essence)
    metadata = {"name": "sums", "managedFields": [Uncopied()]}
    body = kopf.Body({"metadata": metadata, "spec": {"seed": 1}, "status": Uncopied()})
    assert progress.clear(essence=storage.build(body=body)) == {"spec": {"seed": 1}}
    with pytest.raises(TypeError, match="copied"):
        plain.build(body=body)


class Uncopied(dict):
    def __deepcopy__(self, memo):
        raise TypeError("copied")


def test_reviews_of_new_and_changed_rljobs_go_to_the_operators_own_server():
    before, registry = kopf.get_default_registry(), kopf.OperatorRegistry()
    kopf.set_default_registry(registry)
    settings, server = kopf.OperatorSettings(), AdmissionServer()
    try:
        handlers._review(settings, server)
    finally:
        kopf.set_default_registry(before)
    (handler,) = registry._webhooks.get_all_handlers()
    assert (handler.id, handler.fn, handler.subresource) == ("validate", handlers.validate, None)
    assert [*handler.operations] == ["CREATE", "UPDATE"]
    assert settings.admission.server == server.connect
    assert settings.admission.managed is None, "the chart writes the configuration of the API server"


def test_without_a_webhook_kopf_has_no_handler_of_admission(tmp_path):
    assert service(tmp_path).admission is None
    assert not kopf.get_default_registry()._webhooks.get_all_handlers()
