"""Entry point `rljob-operator`: checks the settings, then runs kopf with the operator's handlers."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from rljob.operator.config import CONFIG, OperatorSettings, start_of

HANDLERS = "rljob.operator.handlers"


def main() -> None:
    """Run the operator until SIGTERM; exit code 2 when its settings are wrong, 1 when it failed or lost its lease."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="rljob-operator", description="Reconciles the RLJobs of a cluster.")
    parser.add_argument("--config", default=os.environ.get(CONFIG), help="file of settings")
    parser.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG"), help="outside a cluster")
    parser.add_argument("kopf", nargs="*", help="options of `kopf run`, after --; for example -- -m acme.hooks")
    given = parser.parse_args()
    os.environ |= {key: value for key, value in ((CONFIG, given.config), ("KUBECONFIG", given.kubeconfig)) if value}
    try:
        settings = start_of().settings
    except ValueError as error:
        logging.error("%s", error)
        sys.exit(2)
    from kopf.cli import main as kopf

    logging.getLogger().handlers.clear()  # kopf adds its own
    kopf([*kopf_arguments(settings), *given.kopf])


def kopf_arguments(settings: OperatorSettings) -> Sequence[str]:
    """Return the arguments of kopf."""
    where = [part for name in settings.namespaces for part in ("-n", name)] or ["-A"]
    return ["run", "--standalone", "-m", HANDLERS, *where]


if __name__ == "__main__":
    main()
