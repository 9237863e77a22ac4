"""vLLM's worker, with one corrupted update and requests in flight when it arrives."""

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from corrupt.wire import before_step
from rljob.rollout.adapters.vllm.weight_transfer import WorkerExtension

_execute_model = GPUModelRunner.execute_model


def _execute_after_wait(runner, scheduler_output, *arguments, **options):
    new = scheduler_output.scheduled_new_reqs
    before_step(sum(request.sampling_params.max_tokens > 1 for request in new), seconds=0.5)  # the others are probes
    return _execute_model(runner, scheduler_output, *arguments, **options)


GPUModelRunner.execute_model = _execute_after_wait


class CorruptExtension(WorkerExtension):
    """The extension, loaded after receiver and model runner were changed."""
