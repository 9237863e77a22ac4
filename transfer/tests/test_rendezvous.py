"""Rivals of the engine: processes that reach the ports of a weight group and do not know its nonce."""

import contextlib
import re
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rljob.transfer import handshake, rendezvous
from rljob.transfer.rendezvous import MAX_HANDSHAKES, Rendezvous, connect, listen

HOST = "127.0.0.1"
SECONDS = 60.0


@pytest.fixture
def rival():
    """Function that connects to the port of a group."""
    with contextlib.ExitStack() as stack:
        yield lambda place: stack.enter_context(socket.create_connection((place.address, place.port), SECONDS))


def is_closed(place):
    try:
        socket.create_connection((place.address, place.port), SECONDS).close()
    except ConnectionRefusedError:
        return True
    return False


def pass_weights(group):
    """Broadcast a tensor to all workers."""
    end, received = time.monotonic() + SECONDS, {}

    def receive(rank):
        received[rank] = torch.zeros(4)
        group.members[rank].broadcast(received[rank], 0, end)

    workers = [threading.Thread(target=receive, args=(rank,)) for rank in group.members if rank]
    for worker in workers:
        worker.start()
    group.members[0].broadcast(torch.arange(4.0), 0, end)
    for worker in workers:
        worker.join(SECONDS)
    return [tensor.tolist() for tensor in received.values()]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_members_join_in_any_order_and_the_port_is_closed_then(form, workers):
    group = form(workers=workers)
    for rank in range(workers, 0, -1):
        group.join(rank)
    group.host().wait()
    assert sorted(group.members) == list(range(workers + 1)), group.errors
    assert is_closed(group.place)
    assert pass_weights(group) == [[0.0, 1.0, 2.0, 3.0]] * workers


def test_the_nonce_is_neither_shown_nor_sent(form):
    group = form()
    assert group.place.group not in repr(group.place)
    seen = []
    with listen(HOST) as tap:
        place = Rendezvous(group.place.group, HOST, tap.getsockname()[1], 2)
        threading.Thread(target=_relay, args=(tap, group.place, seen), daemon=True).start()
        group.host()
        with connect(place, 1, time.monotonic() + SECONDS):
            pass
    group.wait()
    assert len(b"".join(seen)) > 100
    assert place.group.encode() not in b"".join(seen)


def _relay(tap, place, seen):
    """Relay and record one connection."""
    client, _ = tap.accept()
    server = socket.create_connection((place.address, place.port), SECONDS)

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                seen.append(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=copy, args=(server, client), daemon=True)
    back.start()
    copy(client, server)
    back.join(SECONDS)


GARBAGE = {
    "silence": b"",
    "half a hello": handshake.MAGIC,
    "HTTP": b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n" * 3,
    "zeros": bytes(1 << 16),
    "a hello and a guess": handshake.MAGIC + struct.pack("!I", 1) + bytes(32) + bytes(32),
    "a rank that does not exist": handshake.MAGIC + struct.pack("!I", 0xFFFFFFFF) + bytes(64),
}


@pytest.mark.parametrize("message", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_rival_that_connects_first_does_not_keep_the_engine_away(form, rival, message):
    group = form()
    rivals = [rival(group.place) for _ in range(3)]
    for each in rivals:
        each.sendall(message)
    group.host().join().wait()
    assert sorted(group.members) == [0, 1], group.errors
    for each in rivals:
        with contextlib.suppress(ConnectionResetError):
            answer = each.recv(4096)
            assert len(answer) in (0, 64)  # of a hello: random bytes and the proof of the sender
            assert each.recv(4096) == b""


def test_rivals_that_reset_their_connections_do_not_keep_the_engine_away(form, rival):
    group = form()
    for message in (b"", handshake.MAGIC + struct.pack("!I", 1) + bytes(32)):
        connection = rival(group.place)
        connection.sendall(message)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    group.host().join().wait()
    assert sorted(group.members) == [0, 1], group.errors


def test_the_store_of_torch_finds_nothing_to_list_there(form):
    group = form().host()
    with pytest.raises(RuntimeError):
        dist.TCPStore(HOST, group.place.port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
    group.join().wait()
    assert sorted(group.members) == [0, 1], group.errors


def test_a_wrong_nonce_and_a_process_in_place_of_the_sender_are_told(form):
    group = form(seconds=1.0).host()
    wrong = Rendezvous("guessed", HOST, group.place.port, 2)
    with pytest.raises(RuntimeError, match="is not the trainer: the process that listens there does not know"):
        connect(wrong, 1, time.monotonic() + SECONDS)
    group.wait()
    assert (
        group.errors[0]
        == "0 of 1 workers of the engine joined the weight group in time; 1 other connections were refused"
    )
    assert is_closed(group.place)


def test_a_recorded_handshake_opens_no_other_group(form):
    first, second, seen = form(), form(), []
    with listen(HOST) as tap:
        place = Rendezvous(first.place.group, HOST, tap.getsockname()[1], 2)
        threading.Thread(target=_relay, args=(tap, first.place, seen), daemon=True).start()
        first.host()
        member = connect(place, 1, time.monotonic() + SECONDS)
        member.close()
    first.wait()
    hello, proof = (next(data for data in seen if len(data) == size) for size in (52, 32))
    second.host()
    with socket.create_connection((HOST, second.place.port), SECONDS) as rival:
        rival.sendall(hello)
        assert len(rival.recv(64, socket.MSG_WAITALL)) == 64
        rival.sendall(proof)
        assert rival.recv(64) == b""
    second.join().wait()
    assert sorted(second.members) == [0, 1], second.errors


def test_the_engine_joins_during_a_flood_of_connections(form, rival):
    group = form()
    stop = threading.Event()
    held = []

    def flood():
        with contextlib.suppress(OSError):  # the port is closed
            while not stop.is_set():
                held.append(socket.create_connection((HOST, group.place.port), SECONDS))

    floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    group.host()
    for each in floods:
        each.start()
    while len(held) < 2 * MAX_HANDSHAKES:
        assert any(each.is_alive() for each in floods)
        time.sleep(0.001)
    assert len(group.listener._pending) <= MAX_HANDSHAKES
    group.join().wait()
    stop.set()
    assert sorted(group.members) == [0, 1], group.errors
    for each in floods:
        each.join(SECONDS)
    for each in held:
        each.close()


def test_a_silent_connection_ends_by_its_own_time_limit(form, rival, monkeypatch):
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", 0.05)
    group = form().host()
    assert rival(group.place).recv(1) == b""
    group.join().wait()
    assert sorted(group.members) == [0, 1], group.errors


def test_no_second_member_has_the_rank_of_the_first(form):
    group = form(workers=2, seconds=5.0).host()
    with connect(group.place, 1, time.monotonic() + SECONDS):
        with pytest.raises(RuntimeError, match="did not accept rank 1 in time"):
            connect(group.place, 1, time.monotonic() + 0.3)
        assert sorted(group.listener._members) == [1]


@pytest.mark.parametrize("phase", ["no worker joined", "a worker waits for another"])
def test_closing_a_group_ends_the_joining_of_its_members_at_once(form, phase):
    group = form(workers=2, seconds=1000.0).host()
    if phase == "a worker waits for another":
        group.join(1)
        while not group.listener._members:
            time.sleep(0.001)
    group.listener.close()
    group.listener.close()
    group.wait()
    assert group.errors[0] == "the weight group was abandoned"
    assert set(group.errors) == {0, 1} if phase == "a worker waits for another" else {0}
    assert is_closed(group.place)


def accepted(group):
    """Return the members whose connections the sender accepts while a worker connects."""
    joining = threading.Thread(target=lambda: connect(group.place, 1, time.monotonic() + SECONDS).close(), daemon=True)
    joining.start()
    members = group.listener.accept_members(time.monotonic() + SECONDS)
    joining.join(SECONDS)
    return members


def test_the_port_is_closed_before_the_members_exchange_anything(form):
    group = form()
    assert sorted(accepted(group)) == [1]
    assert is_closed(group.place)


def test_a_group_that_is_closed_while_its_last_member_is_accepted_does_not_form(form, monkeypatch):
    group, accept = form(), handshake.SenderHandshake.accept

    def close_and_accept(self):
        group.listener.close()
        accept(self)

    monkeypatch.setattr(handshake.SenderHandshake, "accept", close_and_accept)
    with pytest.raises(RuntimeError, match="the weight group was abandoned"):
        accepted(group)


def test_a_group_that_is_closed_before_its_sender_waits_has_no_port(form):
    group = form()
    group.listener.close()
    assert is_closed(group.place)
    group.host().join().wait()
    assert group.errors[0] == "the weight group was abandoned"
    assert re.search("the sender at 127.0.0.1 port .* cannot be reached", group.errors[1])


def test_joining_without_a_sender_ends_by_the_timeout(form):
    group = form(seconds=0.5).join().wait()
    assert "did not accept rank 1 in time" in group.errors[1]


def test_it_listens_on_all_addresses_if_the_machine_does_not_own_the_host():
    with listen("192.0.2.1") as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), 1.0).close()
