"""Entry point of the runner: rljob-runner."""

import logging
import os
import sys


def main() -> None:
    """Serve the coordinator that the environment names; exit 2 when the configuration cannot work."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # some datasets iterate over sets of strings; see runner/data.py
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import uvloop

    from rljob.protocol.environment import read_environment, reward_urls
    from rljob.protocol.link import RefusedError
    from rljob.runner.wiring import prepare, serve

    try:
        uvloop.run(serve(prepare(read_environment(), reward_urls())))
    except (ValueError, RefusedError) as error:
        logging.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
