"""HOST:PORT, of either family."""

from __future__ import annotations

import pytest

from rljob.protocol.addresses import host_and_port


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
def test_an_address_is_taken_apart(address: str, parts: tuple[str, str]) -> None:
    assert host_and_port(address) == parts
