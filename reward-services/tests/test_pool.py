from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from rljob.api.rewards import NotScored, Unavailable
from rljob.protocol.score_messages import MAX_SCORE_BYTES, Score, ScoreItem
from rljob.rewards import metrics, pool, pool_worker
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.pool import Pool
from rljob.rewards.worker import fork_worker

HANG = "hang"
NAP = "nap"
DIE = "die"
WRITE = "write "
CLOSE = "close"


class Each:
    """Scores samples one by one with a function."""

    batched = together = deterministic = False

    def __init__(self, score) -> None:
        self._score = score

    def set_up(self) -> None:
        pass

    def score_all(self, items, send, seconds) -> None:
        for each in items:
            send(self._score(each))


def item(sample: str, completion: str = "") -> ScoreItem:
    return ScoreItem(sample, "sums", "", completion, "stop", {})


def score(item: ScoreItem) -> Score:
    """Return the worker's process id as the reward; some completions hang, sleep or crash."""
    if item.completion == HANG:
        while True:
            pass
    if item.completion == DIE:
        os.kill(os.getpid(), signal.SIGSEGV)
    if item.completion.startswith(WRITE):  # to the service, instead of the score
        socket_to_service().sendall(item.completion.removeprefix(WRITE).encode() + b"\n")
    if item.completion == CLOSE:
        socket_to_service().shutdown(socket.SHUT_RDWR)
    if item.completion == NAP:
        time.sleep(0.1)
    return Score(item.sample, float(os.getpid()), {}, "")


def socket_to_service() -> socket.socket:
    (number,) = (int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and _is_socket(int(name)))
    return socket.socket(fileno=os.dup(number))


def _is_socket(number: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:  # of the list of the directory itself
        return False


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended(pid: int, seconds: float = 10) -> bool:
    """Return whether a process ends within ``seconds``; a zombie has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return select.select([process], [], [], seconds)[0] == [process]
    finally:
        os.close(process)


async def test_scores_have_the_order_of_the_items():
    async with Pool(Each(score), "r", processes=2, timeout_seconds=10) as pool:
        names = [f"g{i}.0" for i in range(200)]
        assert [result.sample for result in await pool.score([item(name) for name in names])] == names


async def test_concurrent_requests_share_all_workers(tmp_path):
    def waits_for_the_other(item):
        (tmp_path / str(os.getpid())).touch()
        while len(os.listdir(tmp_path)) < 2:
            time.sleep(0.001)
        return score(item)

    async with Pool(Each(waits_for_the_other), "r", processes=2, timeout_seconds=60) as pool:
        results = await asyncio.gather(*(pool.score([item(f"g{r}.{i}") for i in range(50)]) for r in range(4)))
    assert [[v.sample for v in some] for some in results] == [[f"g{r}.{i}" for i in range(50)] for r in range(4)]
    assert len({v.reward for some in results for v in some}) == 2


class SetsUp(Each):
    """Calls a function in each worker before its first sample."""

    def __init__(self, set_up) -> None:
        super().__init__(score)
        self.set_up = set_up


async def test_a_worker_gets_no_sample_before_it_is_set_up(tmp_path):
    """The time limit of a sample begins when a worker gets it."""

    def waits():
        (tmp_path / "begun").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.001)

    async with Pool(SetsUp(waits), "r", processes=1, timeout_seconds=10) as workers:
        asked = asyncio.create_task(workers.score([item("a")]))
        async with asyncio.timeout(60):
            while not (tmp_path / "begun").exists():
                await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        assert workers.waiting == 1
        (tmp_path / "go").touch()
        assert (await asked)[0].error == ""


async def test_samples_do_not_wait_for_a_set_up_that_takes_long(monkeypatch, tmp_path):
    def waits():
        while not (tmp_path / "go").exists():
            time.sleep(0.001)

    monkeypatch.setattr(pool, "SET_UP_SECONDS", 0.01)
    async with Pool(SetsUp(waits), "r", processes=2, timeout_seconds=10) as workers:
        asked = await workers.score([item("a"), item("b")])
        asked += await workers.score([item("c")])  # also one that came after the time
        monkeypatch.setattr(pool, "SET_UP_SECONDS", 60.0)
        (tmp_path / "go").touch()
        await workers.wait_until_ready()
        (scored,) = await workers.score([item("a")])
    why = "reward r cannot score now: its worker is being set up"
    assert asked == [Score(name, 0.0, error=why, later=True) for name in "abc"]
    assert scored.error == "" and workers.not_ready == ""


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (KeyError("no\nmodel"), "KeyError: 'no\\nmodel'"),
        (ValueError("two\nlines \ud800"), "ValueError: two lines \\ud800"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError("x" * 5000), f"MemoryError: {'x' * 940}"),
    ],
    ids=ascii,
)
async def test_samples_of_a_reward_that_cannot_be_set_up_are_asked_for_later(monkeypatch, tmp_path, raised, why):
    def fails():
        if not (tmp_path / "good").exists():
            raise raised

    monkeypatch.setattr(pool, "FIRST_BACKOFF_SECONDS", 0.0)
    async with Pool(SetsUp(fails), "r", processes=1, timeout_seconds=10) as workers:
        (asked,) = await workers.score([item("a")])
        assert asked.later and asked.error.startswith(f"reward r cannot score now: set_up raised {why}")
        (tmp_path / "good").touch()
        async with asyncio.timeout(60):
            while (scored := (await workers.score([item("a")]))[0]).later:
                pass
    assert scored.error == ""


async def test_a_service_whose_worker_ends_in_its_set_up_says_how(monkeypatch, tmp_path):
    def dies():
        if not (tmp_path / "good").exists():
            os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr(pool, "FIRST_BACKOFF_SECONDS", 0.0)
    async with Pool(SetsUp(dies), "r", processes=1, timeout_seconds=10) as workers:
        await workers.wait_until_ready()
        assert workers.not_ready == "its worker ended before it was set up (SIGSEGV)"
        (tmp_path / "good").touch()
        (scored,) = await workers.score([item("a")])
    assert scored.error == "" and workers.not_ready == ""


@pytest.mark.parametrize("end", ["hang", "die"])
async def test_a_sample_that_ended_its_worker_is_asked_for_later_and_has_one_try_left(monkeypatch, tmp_path, end):
    """The samples of its request do not wait while no worker can be set up."""

    def waits():
        while (tmp_path / "wait").exists():
            if end == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)

    monkeypatch.setattr(pool, "FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(pool, "SET_UP_SECONDS", 0.05)
    async with Pool(SetsUp(waits), "r", processes=1, timeout_seconds=10) as workers:
        await workers.wait_until_ready()
        (tmp_path / "wait").touch()
        bad, other = await workers.score([item("a", DIE), item("b")])
        assert bad.later and other.later and bad.error.startswith("reward r cannot score now: its worker ")
        (tmp_path / "wait").unlink()
        async with asyncio.timeout(60):
            while workers.not_ready:
                await asyncio.sleep(0.001)
        before = metrics.CRASHES._value.get()
        monkeypatch.setattr(pool, "SET_UP_SECONDS", 60.0)
        bad, other = await workers.score([item("a", DIE), item("b")])
    assert bad.error == "reward r: the worker exited (SIGSEGV) twice on this sample"
    assert other.error == "" and metrics.CRASHES._value.get() == before + 1


async def test_a_sample_that_shared_a_chunk_with_one_that_crashed_keeps_its_tries(monkeypatch, tmp_path):
    """It was asked for later because no worker could be set up, and was not the cause."""

    class Together(SetsUp):
        together = True

    def waits():
        while (tmp_path / "wait").exists():
            time.sleep(0.001)

    monkeypatch.setattr(pool, "SET_UP_SECONDS", 0.05)
    async with Pool(Together(waits), "r", processes=1, timeout_seconds=10) as workers:
        await workers.wait_until_ready()
        (tmp_path / "wait").touch()
        first, second = await workers.score([item("a", DIE), item("b", DIE)])
        assert first.later and second.later and sorted(workers._tries.values()) == [0, 0]
        (tmp_path / "wait").unlink()
        monkeypatch.setattr(pool, "SET_UP_SECONDS", 60.0)
        await workers.wait_until_ready()
        before = metrics.CRASHES._value.get()
        for score in await workers.score([item("a", DIE), item("b", DIE)]):
            assert score.error.endswith("twice on this sample")
        assert metrics.CRASHES._value.get() == before + 4


async def test_a_long_set_up_is_logged_once(monkeypatch, tmp_path, caplog):
    def waits():
        while not (tmp_path / "go").exists():
            time.sleep(0.001)

    monkeypatch.setattr(pool, "SET_UP_SECONDS", 0.01)
    async with Pool(SetsUp(waits), "slow", processes=1, timeout_seconds=10) as workers:
        for name in "ab":
            await workers.score([item(name)])
        (tmp_path / "go").touch()
        await workers.wait_until_ready()
        assert [record.message for record in caplog.records] == [
            "reward slow: no worker has been set up for 0.01 s; samples wait until one is"
        ]


async def test_a_reward_that_forks_and_returns_twice_has_one_score():
    def forks(item):
        child = os.fork()
        if child:
            os.waitpid(child, 0)  # it has returned before
        return Score(item.sample, float(child > 0), {}, "")

    async with Pool(Each(forks), "r", processes=1, timeout_seconds=10) as workers:
        for name in "ab":
            assert await workers.score([item(name)]) == [Score(name, 1.0, {}, "")]


async def test_a_set_up_that_forks_and_returns_twice_is_one_worker():
    children = []

    def forks():
        if child := os.fork():
            children.append(os.waitpid(child, 0)[1])  # it has ended instead of serving

    def of_parent(item):
        return Score(item.sample, float(len(children)), {}, "")

    class Forks(Each):
        def set_up(self):
            forks()

    async with Pool(Forks(of_parent), "r", processes=1, timeout_seconds=10) as workers:
        for name in "ab":
            assert await workers.score([item(name)]) == [Score(name, 1.0, {}, "")]


async def test_the_tries_of_few_samples_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "KEPT_TRIES", 2)
    monkeypatch.setattr(pool, "SET_UP_SECONDS", 0.05)

    def waits():
        while (tmp_path / "wait").exists():
            time.sleep(0.001)

    async with Pool(SetsUp(waits), "r", processes=1, timeout_seconds=10) as workers:
        for number in range(3):
            await workers.wait_until_ready()
            async with asyncio.timeout(60):
                while workers.not_ready:
                    await asyncio.sleep(0.001)
            (tmp_path / "wait").touch()
            (bad,) = await workers.score([item(f"a{number}", DIE)])
            assert bad.later
            (tmp_path / "wait").unlink()
        assert len(workers._tries) == 2


class Later:
    """An awaitable that is no coroutine."""

    def __init__(self, work) -> None:
        self._work = work

    def __await__(self):
        return self._work().__await__()


@pytest.mark.parametrize("kind", [lambda work: work(), Later])
async def test_a_set_up_may_be_async(kind):
    class Reward:
        def set_up(self):
            return kind(self.find_loop)

        async def find_loop(self):
            self.loop = asyncio.get_running_loop()

        async def __call__(self, completion):
            return float(self.loop is asyncio.get_running_loop())

    async with Pool(RewardEvaluator(Reward(), "r"), "r", processes=1, timeout_seconds=10) as workers:
        assert (await workers.score([item("a")])) == [Score("a", 1.0)]


async def test_a_sample_that_times_out_affects_no_other():
    before = metrics.TIMEOUTS._value.get()
    async with Pool(Each(score), "slow", processes=1, timeout_seconds=2) as pool:
        first, bad, *rest = await pool.score([item("a"), item("b", HANG), item("c"), item("d")])
    assert bad == Score("b", 0.0, {}, "reward slow took longer than 2 s")
    assert [(v.sample, v.error) for v in (first, *rest)] == [("a", ""), ("c", ""), ("d", "")]
    assert first.reward != rest[0].reward == rest[1].reward, "the worker is replaced once; the bad sample is the last"
    assert gone(int(first.reward))
    assert metrics.TIMEOUTS._value.get() == before + 2


@pytest.mark.parametrize("end", [HANG, DIE])
async def test_a_sample_whose_worker_hung_or_crashed_is_scored_by_the_next_one(tmp_path, end):
    def once(item):
        if item.completion and not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            return score(item)
        return Score(item.sample, float(os.getpid()))

    before = kinds()
    async with Pool(Each(once), "r", processes=1, timeout_seconds=0.5) as pool:
        results = await pool.score([item("a"), item("b", end), item("c")])
    assert [v.error for v in results] == ["", "", ""]
    assert results[0].reward != results[1].reward == results[2].reward
    assert kinds() == before


@pytest.mark.parametrize("end", [HANG, DIE])
async def test_the_processes_that_a_reward_started_end_with_its_worker(tmp_path, end):
    def starts(item):
        if item.completion != "good":
            process = subprocess.Popen(["sleep", "600"], start_new_session=item.completion == HANG)
            command = f"sleep 600 & echo $! {process.pid} {os.getpid()} >> {tmp_path}/pids"
            subprocess.run(["sh", "-c", command], check=True)  # its parent ends at once
            subprocess.run(["sh", "-c", command], check=True, start_new_session=True)  # a daemon
        return score(item)

    async with Pool(Each(starts), "r", processes=2, timeout_seconds=1) as pool:
        bad, good = await pool.score([item("a", end), item("b", "good")])
        (later,) = await pool.score([item("c", "good")])
        assert bad.error and not good.error and not later.error
        pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
        assert len(pids) >= 4
        for pid in pids:
            assert ended(pid), f"process {pid} is left"
        assert not ended(int(later.reward), seconds=0)


async def test_the_limit_is_for_each_sample_not_for_a_chunk():
    async with Pool(Each(score), "r", processes=1, timeout_seconds=2) as pool:
        results = await pool.score([item(f"g{i}.0", NAP) for i in range(22)])
    assert [v.error for v in results] == [""] * 22
    assert len({v.reward for v in results}) == 1, "all together exceed the limit, none does alone"


async def test_a_sample_that_kills_its_worker_twice_is_an_error():
    before = metrics.CRASHES._value.get()
    async with Pool(Each(score), "crash", processes=1, timeout_seconds=10) as pool:
        bad, good = await pool.score([item("a", DIE), item("b")])
    assert bad.error == "reward crash: the worker exited (SIGSEGV) twice on this sample"
    assert good.error == ""
    assert metrics.CRASHES._value.get() == before + 2


async def test_an_idle_worker_that_is_killed_is_replaced():
    async with Pool(Each(score), "r", processes=1, timeout_seconds=10) as pool:
        (first,) = await pool.score([item("a")])
        os.kill(int(first.reward), signal.SIGKILL)
        (second,) = await pool.score([item("b")])
    assert second.error == "" and second.reward != first.reward


async def test_a_cancelled_request_is_not_scored():
    async with Pool(Each(score), "r", processes=1, timeout_seconds=2) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pool.score([item("a", HANG), *(item(f"b{i}", HANG) for i in range(1000))])
        (result,) = await pool.score([item("c")])
    assert result.error == ""


async def test_closing_the_pool_kills_hanging_workers():
    before = psutil.Process().children()
    async with Pool(Each(score), "r", processes=2, timeout_seconds=60) as pool:
        (result,) = await pool.score([item("a")])
        stuck = asyncio.create_task(pool.score([item("b", HANG), item("c", HANG)]))
        await asyncio.sleep(0)
        assert len(psutil.Process().children()) == len(before) + 2
    stuck.cancel()
    assert gone(int(result.reward))
    assert psutil.Process().children() == before, "all workers have ended and are reaped"


async def test_daemons_that_have_ended_leave_no_zombie_while_their_worker_lives():
    def starts(item):
        subprocess.run(["sh", "-c", "true &"], check=True, start_new_session=True)
        return Score(item.sample, float(os.getpid()), {}, "")

    def zombies(parent):
        found = []
        for each in parent.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it is reaped now
                if each.status() == psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    async with Pool(Each(starts), "r", processes=1, timeout_seconds=10) as pool:
        first, *_, last = await pool.score([item(f"g{i}.0") for i in range(5)])
        assert first.reward == last.reward
        parent = psutil.Process(int(last.reward)).parent()  # only below it: other tests may have left zombies
        async with asyncio.timeout(60):
            while zombies(parent):
                await asyncio.sleep(0.01)


async def test_a_worker_that_does_not_start_costs_no_sample(monkeypatch):
    """There may be a process left for the worker's parent, and none for the worker."""
    fails = iter([True] * 3)

    def fork(*arguments):
        if next(fails, False):
            ours, theirs = socket.socketpair()
            theirs.close()
            if not (pid := os.fork()):
                os._exit(1)
            return pid, ours
        return fork_worker(*arguments)

    monkeypatch.setattr(pool_worker, "fork_worker", fork)
    monkeypatch.setattr(pool, "FIRST_BACKOFF_SECONDS", 0.0)
    async with Pool(Each(score), "r", processes=1, timeout_seconds=10) as workers:
        (result,) = await workers.score([item("a")])
    assert result.error == ""
    assert next(fails, None) is None


SCORE = '{"sample":"b","reward":1.0}'


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("no score", id="no JSON"),
        pytest.param("", id="an empty line"),
        pytest.param('{"sample":"b"}', id="another shape"),
        pytest.param('{"sample":"b","reward":NaN}', id="not a number"),
        pytest.param('{"sample":"b","reward":1e999}', id="infinite"),
        pytest.param('{"sample":"x","reward":1.0}', id="another sample"),
        pytest.param('{"sample":"\\ud800","reward":1.0}', id="a surrogate"),
        pytest.param(f'{{"x":{"[" * 10_000}{"]" * 10_000},{SCORE[1:]}', id="deep"),
        pytest.param(f'{{"x":"{"x" * MAX_SCORE_BYTES}",{SCORE[1:]}', id="a line that is too long"),
        pytest.param("x" * 3 * MAX_SCORE_BYTES, id="much more than that"),
    ],
)
async def test_a_worker_that_writes_no_score_costs_its_sample_only(written):
    before = metrics.CRASHES._value.get()
    async with Pool(Each(score), "odd", processes=1, timeout_seconds=10) as workers:
        results = await workers.score([item("a"), item("b", WRITE + written), item("c"), item("d")])
        (later,) = await workers.score([item("e")])
    assert [(v.sample, bool(v.error)) for v in results] == [("a", False), ("b", True), ("c", False), ("d", False)]
    assert results[1].error.startswith("reward odd: the worker wrote something other than ")
    assert results[1].error.endswith(" twice on this sample")
    assert later.error == ""
    assert metrics.CRASHES._value.get() == before + 2


async def test_a_worker_that_closes_its_socket_costs_its_sample_only():
    async with Pool(Each(score), "odd", processes=1, timeout_seconds=10) as workers:
        bad, good = await workers.score([item("a", CLOSE), item("b")])
    assert bad.error.startswith("reward odd: the worker exited (") and good.error == ""


async def test_a_reward_that_prints_is_no_fault(capfd):
    def prints(completion):
        os.write(1, b"{}\n" * 10)
        os.write(2, b"x" * 100_000)
        return 1.0

    async with Pool(RewardEvaluator(prints, "prints"), "prints", processes=1, timeout_seconds=10) as workers:
        assert [v.error for v in await workers.score([item("a"), item("b")])] == ["", ""]


@pytest.mark.parametrize(
    ("metrics_of_sample", "error"),
    [
        ({"x" * 2_000_000: 1.0}, "the reward returned 1,953 KiB of metrics; at most 256 KiB"),
        ({str(i): 1.0 for i in range(50_000)}, "the reward returned 575 KiB of metrics; at most 256 KiB"),
        ({"\ud800": 1.0}, "the reward returned a metric that cannot be sent: "),
    ],
)
async def test_metrics_that_cannot_be_sent_fail_their_sample_and_the_worker_stays(metrics_of_sample, error):
    def returns(completion):
        return float(os.getpid()), metrics_of_sample if completion else {}

    async with Pool(RewardEvaluator(returns, "large"), "large", processes=1, timeout_seconds=10) as workers:
        first, bad, last = await workers.score([item("a"), item("b", "x"), item("c")])
    assert bad.error.startswith(error) and bad.metrics == {}
    assert first.error == last.error == "" and first.reward == last.reward


@pytest.mark.parametrize("bad", [item("\ud800"), item("b", "\ud800")], ids=ascii)
async def test_a_sample_that_no_worker_can_receive_fails(bad):
    async with Pool(Each(score), "r", processes=1, timeout_seconds=10) as workers:
        first, failed, last = await workers.score([item("a"), bad, item("c")])
    assert failed.error.startswith("the sample cannot be passed to a worker: ") and first.error == last.error == ""


async def test_a_row_that_is_nested_too_deeply_fails_its_sample():
    deep = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    async with Pool(Each(score), "r", processes=1, timeout_seconds=10) as workers:
        bad, good = await workers.score([ScoreItem("a", "", "", "", "", {"row": deep}), item("b")])
    assert bad.error.startswith("the sample cannot be passed to a worker: maximum recursion") and good.error == ""


async def test_a_service_without_a_free_process_tries_again(monkeypatch, caplog):
    failures = iter([BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")] * 3)

    def fork(*arguments):
        for error in failures:
            raise error
        return fork_worker(*arguments)

    monkeypatch.setattr(pool_worker, "fork_worker", fork)
    monkeypatch.setattr(pool, "FIRST_BACKOFF_SECONDS", 0.0)
    async with Pool(Each(score), "r", processes=1, timeout_seconds=10) as workers:
        (result,) = await workers.score([item("a")])
    assert result.error == ""
    assert [record.message for record in caplog.records] == [
        "reward r: a worker cannot be used; trying another one"
    ] * 3


async def test_a_defect_of_the_service_fails_a_sample_and_ends_nothing(monkeypatch):
    class Decoder:
        def decode(self, line):
            if b'"b"' in line:
                raise RuntimeError("a defect")
            return decoder.decode(line)

    decoder = pool_worker._decoder
    monkeypatch.setattr(pool_worker, "_decoder", Decoder())
    monkeypatch.setattr(pool, "FIRST_BACKOFF_SECONDS", 0.0)
    async with Pool(Each(score), "r", processes=1, timeout_seconds=10) as workers:
        results = await workers.score([item("a"), item("b"), item("c")])
    assert [v.error for v in results] == ["", "reward r: the worker cannot be used twice on this sample", ""]


def test_workers_die_with_a_service_that_is_killed():
    reading, writing = os.pipe()
    service = os.fork()
    if service == 0:
        pid, connection = fork_worker(Each(score))
        connection.sendall(b'[{"sample":"a","task":"","prompt":"","completion":"hang","finish":"","problem":{}}]\n')
        os.write(writing, str(pid).encode())
        signal.pause()
    worker = os.pidfd_open(int(os.read(reading, 20)))
    assert select.select([worker], [], [], 0)[0] == [], "the worker is alive"
    os.kill(service, signal.SIGKILL)
    os.waitpid(service, 0)
    try:
        assert select.select([worker], [], [], 10)[0] == [worker]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)


def test_daemons_die_with_a_service_that_is_killed():
    reading, writing = os.pipe()

    def starts(item):
        subprocess.run(["sh", "-c", "sleep 600 & echo $!"], check=True, start_new_session=True)
        signal.pause()

    service = os.fork()
    if service == 0:
        os.dup2(writing, 1)  # a file that a worker keeps
        _, connection = fork_worker(Each(starts))
        connection.sendall(b'[{"sample":"a","task":"","prompt":"","completion":"","finish":"","problem":{}}]\n')
        signal.pause()
    daemon = int(os.read(reading, 20))
    os.kill(service, signal.SIGKILL)
    os.waitpid(service, 0)
    try:
        assert ended(daemon)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)


def kinds() -> dict[str, float]:
    """Return the samples without a score so far by kind of error."""
    (family,) = metrics.ERRORS.collect()
    return {each.labels["kind"]: each.value for each in family.samples if each.name.endswith("_total")}


def by_completion(completion: str) -> object:
    if completion == DIE:
        os._exit(3)
    if completion == HANG:
        while True:
            pass
    if completion == "refuse":
        return NotScored("took longer than usual")
    if completion == "away":
        raise Unavailable("no engine")
    unusable = {"nan": float("nan"), "none": None, "large": (1.0, {"m": 1e300})}
    return unusable[completion] if completion else 1 / 0


async def test_samples_without_a_score_are_counted_by_kind():
    wanted = {"raised": 1, "not_scored": 1, "unavailable": 1, "unusable": 3, "crash": 1, "timeout": 1}
    texts = ["", "refuse", "away", "nan", "none", "large", DIE, HANG]
    before = kinds()
    async with Pool(RewardEvaluator(by_completion, "took"), "took", processes=1, timeout_seconds=0.5) as pool:
        scores = [(await pool.score([item(f"g{i}", text)]))[0] for i, text in enumerate(texts)]
    assert all(each.error for each in scores)
    after = kinds()
    assert {kind: after[kind] - before.get(kind, 0) for kind in after if after[kind] > before.get(kind, 0)} == wanted


async def test_samples_in_flight_and_in_the_queue_are_counted():
    def value(gauge) -> float:
        return gauge.collect()[0].samples[0].value

    async with Pool(Each(score), "r", processes=1, timeout_seconds=600) as pool:
        asking = [asyncio.create_task(pool.score([item(f"g{i}", HANG)])) for i in range(40)]
        async with asyncio.timeout(60):
            while not value(metrics.IN_FLIGHT):
                await asyncio.sleep(0.01)
        assert value(metrics.IN_FLIGHT) + value(metrics.QUEUED) == 40
        assert value(metrics.IN_FLIGHT) <= 32
        for each in asking:
            each.cancel()
    assert value(metrics.IN_FLIGHT) == 0
