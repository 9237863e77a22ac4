"""The server of a transformers model, with one corrupted update and requests in flight when it arrives."""

import sys

from mypackage.server import serve
from qwen.server import QwenServer

from corrupt.wire import before_step


class CorruptServer(QwenServer):
    """Slow between the first batch and the corrupted update."""

    async def generate(self, request, token_ids, sampling):
        before_step(1, seconds=0)
        return await super().generate(request, token_ids, sampling)

    def logits(self, tokens):
        before_step(0, seconds=0.1)  # of one request
        return super().logits(tokens)


if __name__ == "__main__":
    serve(CorruptServer(sys.argv[1]))
