"""Entry point of a simulation: ``rljob simulate`` starts it, because the command line imports no component.

Reads a :class:`SimulationRequest` as JSON from stdin, and writes a :class:`SimulationResult` as JSON to stdout. A
problem with the request is one sentence on stderr, and the exit code is 2.
"""

from __future__ import annotations

import io
import logging
import sys

from rljob.protocol.exit_codes import CONFIGURATION_ERROR


def main() -> None:
    """Simulate."""
    log = io.StringIO()
    logging.basicConfig(level=logging.ERROR, stream=log)
    import msgspec

    from rljob.api.models import RLJob
    from rljob.api.speeds import Speeds
    from rljob.protocol.simulation_messages import SimulationRequest, SimulationResult
    from rljob.simulation.prediction import best_split, predict, predict_split
    from rljob.simulation.prediction_notes import prediction_notes
    from rljob.simulation.timeline import Timeline

    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SimulationRequest)
    job, speeds = RLJob.model_validate(request.job), Speeds.model_validate(request.speeds)
    try:
        splits, slow = predict(job, speeds, request.devices, request.steps)
        best, timeline = best_split(splits), Timeline()
        if request.trace:
            predict_split(job, speeds, best.engines, best.trainer_devices, request.steps, timeline)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(CONFIGURATION_ERROR)
    except Exception:  # a defect: the log says where, and the exit code is 1
        sys.stderr.write(log.getvalue())
        raise
    result = SimulationResult(
        splits,
        slow,
        prediction_notes(job, speeds, request.steps, splits),
        best.engines,
        timeline.to_json() if request.trace else {},
    )
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
