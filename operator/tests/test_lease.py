"""When a lease may be taken, by the local clock. The requests are tested on a real API server."""

import pytest

from rljob.operator.lease import Lease, LeaseSpec, _Lease, _Meta


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lease(clock):
    return Lease(None, "system", "rljob-operator", "me", clock=clock)


def lease_object(version, holder="other", renewed="2026-01-01T00:00:00Z", duration=15):
    return _Lease(_Meta(version), LeaseSpec(holder, duration, renewed, renewed, 0))


def test_a_free_or_own_lease_is_taken_at_once(lease):
    for holder in ("", None, "me"):
        spec = LeaseSpec(holder, 15)
        assert lease.may_take(spec)


def test_a_foreign_lease_is_taken_after_its_duration_without_a_change(lease, clock):
    lease.observe(lease_object("1"))
    assert not lease.may_take(lease_object("1").spec)
    clock.now += 14.9
    lease.observe(lease_object("1"))
    assert not lease.may_take(lease_object("1").spec)
    clock.now += 0.2
    lease.observe(lease_object("1"))
    assert lease.may_take(lease_object("1").spec)


def test_a_renewal_restarts_the_duration_independent_of_its_timestamps(lease, clock):
    lease.observe(lease_object("1"))
    clock.now += 14.0
    lease.observe(lease_object("2", renewed="1999-01-01T00:00:00Z"))
    clock.now += 14.0
    assert not lease.may_take(lease_object("2").spec)


def test_a_lease_is_not_held_before_it_is_renewed(lease):
    assert not lease.held
