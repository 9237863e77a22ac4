"""Waits until Ray has joined on a number of hosts:

    python -m rljob.rollout.ray_hosts HOSTS

A process of its own, because a client of Ray starts threads. It ends with an error while Ray does not answer.
"""

import sys
import time

import ray

POLL_SECONDS = 1.0


def main() -> None:
    """Exit with code 0 once the hosts are there."""
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    while sum(bool(node["Alive"]) for node in ray.nodes()) < int(sys.argv[1]):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
