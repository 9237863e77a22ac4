"""Groups whose members join in threads of the test."""

import contextlib
import threading

import pytest

from rljob.transfer.rendezvous import RendezvousListener
from rljob.transfer.weight_group import WeightGroup

HOST = "127.0.0.1"
SECONDS = 60.0


class Forming:
    """A group whose members join in threads."""

    def __init__(self, workers=1, seconds=SECONDS):
        self.listener = RendezvousListener(HOST, workers + 1)
        self.place = self.listener.rendezvous
        self.seconds = seconds
        self.members, self.errors, self._threads = {}, {}, []

    def host(self):
        """Start the sender."""
        self._start(0, lambda: WeightGroup.host(self.listener, "gloo", self.seconds))
        return self

    def join(self, rank=1):
        """Start a worker."""
        self._start(rank, lambda: WeightGroup.join(self.place, rank, "gloo", self.seconds))
        return self

    def wait(self):
        """Wait until all members have joined or failed."""
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        return self

    def _start(self, rank, form):
        def run():
            try:
                self.members[rank] = form()
            except RuntimeError as error:
                self.errors[rank] = str(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def close(self):
        self.listener.close()
        for member in self.members.values():
            member.abandon()


@pytest.fixture
def form():
    """Function that makes a group."""
    with contextlib.ExitStack() as stack:

        def make(**how):
            group = Forming(**how)
            stack.callback(group.close)
            return group

        yield make
