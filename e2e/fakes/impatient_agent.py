"""The real rollout agent, except that it exits after one failed start of its server."""

from rljob.rollout import engine_restarts
from rljob.rollout.main import main

if __name__ == "__main__":
    engine_restarts.FAILED_STARTS = 1
    main()
