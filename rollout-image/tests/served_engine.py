"""An agent with a real engine server, its coordinator and its trainer, for tests that need vLLM or SGLang."""

import asyncio
import contextlib
import os
import subprocess
import sys
from array import array

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rljob.protocol.agent_protocol import (
    Abort,
    Generate,
    PrepareWeights,
    RegisterEngine,
    RequestId,
    SamplingParams,
    WeightAck,
)
from rljob.protocol.shared_messages import Probe, VersionSpan
from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.bucket_wires import wire_buffers
from rljob.transfer.packed_weights import pack

BUCKET_BYTES = 200_000
LONGEST = 1024
IN_FLIGHT_TOKENS = 600  # about a second
TOLERANCE = 1e-4
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "max_position_embeddings": 1024,
}


def ints(data):
    return array("i", data).tolist()


def floats(data):
    return array("f", data).tolist()


class Trainer:
    """The policy, its sender, and updates numbered from 1."""

    def __init__(self, path, workers=1, **config):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**(CONFIG | config))
        self.model = AutoModelForCausalLM.from_config(config).float().eval()
        self.model.save_pretrained(path)
        self.use("gloo")
        self.workers = workers
        self.version = -1
        self.updates = 0

    def use(self, transport):
        """Send over another transport from now on; the engine joins a new group."""
        self.transport, self.sender = transport, WeightSender("127.0.0.1", 20.0, transport)
        self.buffers = wire_buffers(transport, "cpu")

    def change(self):
        """Change the weights to the next version."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)

    def logprobs(self, tokens, temperature=1.0):
        """Return the log-probability of each token but the first."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1] / temperature
        chosen = torch.tensor(tokens[1:]).unsqueeze(-1)
        return torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1).tolist()

    def tensors(self):
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    def packed(self):
        return pack(self.tensors(), BUCKET_BYTES, buffers=self.buffers)

    def prepare(self, engine, in_flight="keep", fresh=False, timeout=20.0):
        self.updates += 1
        info = self.sender.open(engine, fresh, self.workers)
        sequences = [[5, 6, 7, 8, 9], list(range(20, 60))]
        return PrepareWeights(
            update=self.updates,
            lineage=0,
            version=self.version,
            group=info.group,
            address=info.address,
            port=info.port,
            world_size=info.world_size,
            transport=self.transport,
            bucket_bytes=BUCKET_BYTES,
            parameters=self.packed().parameters,
            probe=Probe(sequences, [self.logprobs(s) for s in sequences]),
            in_flight=in_flight,
            timeout_seconds=timeout,
        )


class Run:
    """An agent process with its coordinator and trainer."""

    def __init__(self, coordinator, trainer, process, model_path):
        self.coordinator = coordinator
        self.trainer = trainer
        self.process = process
        self.model_path = model_path
        self.engine = ""
        self.turns = 0

    async def registered(self):
        registration = await self.coordinator.next(RegisterEngine)
        self.engine = registration.instance
        return registration

    async def update(self, **how):
        return await self.carry_out(self.trainer.prepare(self.engine, **how))

    async def carry_out(self, message):
        await self.coordinator.send(message)
        sent = await asyncio.to_thread(self.trainer.sender.send, self.engine, self.trainer.packed())
        ack = await self.coordinator.next(WeightAck)
        assert (ack.update, ack.version) == (message.update, message.version)
        assert ack.digest == sent == self.trainer.packed().digest()
        assert 0 <= ack.probe_error <= TOLERANCE
        return ack

    def request(self, prompt, tokens, temperature=1.0, stop=()):
        self.turns += 1
        request_id = RequestId("g0.0", self.turns, 0)
        sampling = SamplingParams(temperature, tokens, list(stop), self.turns)
        return Generate(request_id, array("i", prompt).tobytes(), sampling)

    async def update_and_generate(self, requests, **how):
        """Give the engine the next version, which compares digests and the probe; compare what it then samples."""
        self.trainer.change()
        await self.update(**how)
        messages = [self.request([3, 1, 4, i], 20) for i in range(requests)]
        await self.coordinator.send(*messages)
        for i, message in enumerate(messages):
            done = await self.coordinator.completion(message.request_id)
            assert done.spans == [VersionSpan(self.trainer.version, 0, 20)]
            self.check([3, 1, 4, i], done)

    async def aborted(self, prompt, tokens):
        """Abort a request while it generates; return its completion."""
        for seconds in (0.3, 0.1, 1, 3, 0.01, 10):  # to generate some tokens, and not all: no event reports them
            message = self.request(prompt, tokens)
            await self.coordinator.send(message)
            await asyncio.sleep(seconds)
            await self.coordinator.send(Abort([message.request_id], discard=False))
            done = await self.coordinator.completion(message.request_id)
            if done.finish == "abort" and done.token_ids:
                break
        return done

    def server(self):
        """The server's process, child of the agent."""
        return next(
            p for p in psutil.Process(self.process.pid).children() if "rollout.adapters" in " ".join(p.cmdline())
        )

    def check(self, prompt, completion, temperature=1.0):
        """Compare a completion of one version with the trainer's model."""
        tokens = ints(completion.token_ids)
        expected = self.trainer.logprobs([*prompt, *tokens], temperature)[len(prompt) - 1 :]
        worst = max(abs(a - b) for a, b in zip(floats(completion.logprobs), expected, strict=True))
        assert worst <= TOLERANCE


def agent_environment(tmp_path, url, text):
    job = tmp_path / "job.json"
    job.write_text(text)
    return dict(
        os.environ,
        RLJOB_JOB=str(job),
        RLJOB_STORAGE=str(tmp_path),
        RLJOB_COORDINATOR=url,
        RLJOB_TOKEN="t",
        RLJOB_NAME="main",
    )


@contextlib.asynccontextmanager
async def running(path, coordinator, trainer, text):
    """Run an agent whose engine has the trainer's weights of version 0."""
    await coordinator.start()
    environment = agent_environment(path, coordinator.url, text)
    with (path / "agent.log").open("w") as log:
        command = [sys.executable, "-m", "rljob.rollout.main"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    run = Run(coordinator, trainer, process, path / "model")
    try:
        registration = await run.registered()
        assert (registration.lineage, registration.version, registration.running) == (-1, -1, [])
        trainer.change()
        await run.update()
        yield run
    finally:
        process.terminate()
        process.wait(120)
        await coordinator.stop()
        sys.stderr.write((path / "agent.log").read_text()[-20000:])  # shown when a test fails
    assert process.returncode == 0
