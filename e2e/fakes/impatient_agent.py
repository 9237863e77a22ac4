"""The real agent of an engine, but that it gives up when its server has failed to start once."""

from rljob.rollout import agent
from rljob.rollout.main import main

if __name__ == "__main__":
    agent.FAILED_STARTS = 1
    main()
