"""Opens and checks the data, model, rewards and loops of a runner before the run.

`--check` makes the same checks as a start, except for files that the initializer has not made yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob.api.model_address import is_remote
from rljob.api.models import RLJobSpec
from rljob.api.resolve import IN_STORAGE, resolve
from rljob.api.rewards.load_reward import load_reward
from rljob.api.tasks import Task, TaskData
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.model_cache import read_model
from rljob.runner.agents.agent_program import AgentProgram, load_program
from rljob.runner.chat import ChatTemplate
from rljob.runner.conversation import Conversation, text_after_answer
from rljob.runner.data import Source, digests
from rljob.runner.data.readers import DataReaders, RowCheck, open_source
from rljob.runner.data.table import TableSource
from rljob.runner.group_filter import Function, load_function
from rljob.runner.loops import Loop, load_loop
from rljob.runner.prompt_content import Messages, content_of
from rljob.runner.prompts import PromptMaker
from rljob.runner.tokenizer import TextCodec

log = logging.getLogger(__name__)

FIRST_ROWS = 4
SAMPLE_CHAT: Messages = [{"role": "user", "content": "message"}]


@dataclass(frozen=True)
class Prepared:
    """The opened parts of a runner: data, tokenizer, prompts, loops and functions of the user."""

    environment: ComponentEnvironment
    sources: dict[str, Source]
    codec: TextCodec
    maker: PromptMaker
    loops: dict[str, Loop]  # by task name
    agents: dict[str, AgentProgram]  # by the name of a task with an agent
    filters: dict[str, Function]  # by the name of a task with a user-written group filter


def prepare(environment: ComponentEnvironment, readers: DataReaders) -> Prepared:
    """Open every task's data and loop and the policy's tokenizer, check them, and record digests of the data.

    Raises:
        ValueError: the manifest or the data is invalid; one line for each problem.
        ModelUnavailableError: the download of the policy failed and may be repeated.
    """
    read_model(environment, "policy")
    found = _Preparation(environment, readers, will_initialize=False)
    if found.problems:
        raise ValueError("\n".join(found.problems))
    assert found.codec is not None
    digests.record(environment.storage, found.files)
    return Prepared(
        environment,
        found.sources,
        found.codec,
        PromptMaker(found.tasks, found.codec, found.chat),
        found.loops,
        found.agents,
        found.filters,
    )


def check(environment: ComponentEnvironment, readers: DataReaders, will_initialize: bool) -> list[str]:
    """Return one sentence for each problem that prevents a start of the runner. Writes nothing.

    Args:
        environment: of the component.
        readers: those that the job needs.
        will_initialize: whether missing files in the storage will be made before the run; they are not checked.
    """
    return _Preparation(environment, readers, will_initialize).problems


class _Preparation:
    """The opened parts and the problems found; arguments as for :func:`check`."""

    def __init__(self, environment: ComponentEnvironment, readers: DataReaders, will_initialize: bool) -> None:
        self.spec = resolve(environment.job).spec
        self.tasks = {task.name: task for task in self.spec.tasks}
        self.problems: list[str] = []
        self.sources: dict[str, Source] = {}
        self.loops: dict[str, Loop] = {}
        self.agents: dict[str, AgentProgram] = {}
        self.filters: dict[str, Function] = {}
        self.codec: TextCodec | None = None
        self.chat: ChatTemplate | None = None
        self._environment = environment
        self._readers = readers
        self._will_initialize = will_initialize
        self._row_checks: dict[str, RowCheck | None] = {}
        self._open_model()
        for i in range(len(self.spec.rewards)):
            self._load_reward(i)
        for i, task in enumerate(self.spec.tasks):
            with self._collecting_problems():
                self.loops[task.name] = load_loop(task.loop, f"spec.tasks[{i}].loop")
            if task.agent is not None:
                with self._collecting_problems():
                    self.agents[task.name] = load_program(task.agent, f"spec.tasks[{i}].agent")
            if task.group_filter.function is not None:
                with self._collecting_problems():
                    where = f"spec.tasks[{i}].groupFilter.function"
                    self.filters[task.name] = load_function(task.group_filter.function, where)
            self._open_task(i, task)
        with self._collecting_problems():
            self.problems += digests.changed(environment.storage, self.files)

    @property
    def files(self) -> list[tuple[str, Path]]:
        """Each data file, with the field of the manifest that names it."""
        tables = [source for source in self.sources.values() if isinstance(source, TableSource)]
        by_path = {path: where for table in reversed(tables) for where, path in reversed(table.files)}
        return [(where, path) for path, where in by_path.items()]

    def _open_model(self) -> None:
        i, source = next((i, model.source) for i, model in enumerate(self.spec.models) if model.name == "policy")
        path = self._environment.path(source)
        if self._made_later(source):
            return
        with self._collecting_problems(f"spec.models[{i}].source: "):
            self.codec = TextCodec(path)
            if any(task.prompt is None for task in self.spec.tasks):
                self.chat = ChatTemplate(path)

    def _load_reward(self, i: int) -> None:
        """Load the row check of a reward.

        Only the reward service needs the package of a function. If the package is missing here, rows are not checked.
        """
        with self._collecting_problems():
            try:
                loaded = load_reward(self.spec, i)
                self._row_checks[self.spec.rewards[i].name] = loaded.row_check() if loaded is not None else None
            except ValueError as error:
                if not isinstance(error.__cause__, ImportError):
                    raise
                log.warning("rows are not checked by reward %s: %s", self.spec.rewards[i].name, error)

    def _open_task(self, i: int, task: Task) -> None:
        if any(map(self._made_later, _paths(task.data))):
            return
        where, row_check = f"spec.tasks[{i}]", self._row_check(task)
        for j, stop in enumerate(task.sampling.stop if self.codec is not None else []):
            assert self.codec is not None
            with self._collecting_problems(f"{where}.sampling.stop[{j}]: "):
                self.codec.check_stop(stop)
        with self._collecting_problems():
            source = open_source(
                task, row_check, self.spec.seed, f"{where}.data", self._readers, self._environment.path
            )
            self.sources[task.name] = source
            for split in ("train", "heldOut") if self._evaluated(task) else ("train",):
                rows = min(FIRST_ROWS, source.size(split) or FIRST_ROWS)
                problems = [source.problem(split, row) for row in range(rows)]
                with self._collecting_problems(f"{where}: "):
                    if row_check is not None and not isinstance(source, TableSource):  # a table has checked all rows
                        for problem in problems:
                            row_check(problem)
                    self._check_prompts(task, problems)

    def _row_check(self, task: Task) -> RowCheck | None:
        """Return the check of a task's rows by the rewards that score them; None: no reward checks rows."""
        checks = self._row_checks
        if task.reward_column is None and not any(checks.get(name) for name in task.named_rewards):
            return None
        names = [reward.name for reward in self.spec.rewards]

        def check_row(row: dict[str, Any]) -> None:
            for name in (task.reward_of(row, names), *(more.name for more in task.more_rewards)):
                if name is not None and (check_by_reward := checks.get(name)) is not None:
                    check_by_reward(row)

        return check_row

    def _check_prompts(self, task: Task, problems: list[dict[str, Any]]) -> None:
        """Check the contents of a split's first rows, and their prompts if the model exists.

        The observations of an environment are not known yet: its prompts are rendered with a sample text. An agent
        writes its messages later: a short chat checks the template.
        """
        if task.agent is not None:
            if self.chat is not None:
                text_after_answer(self.chat, SAMPLE_CHAT, SAMPLE_CHAT)
            return
        if task.environment is not None:
            self._check_conversation(task, problems[0])
            return
        for problem in problems:
            content_of(task, problem)
        if self.codec is None or (task.prompt is None and self.chat is None):
            return
        maker = PromptMaker({task.name: task}, self.codec, self.chat)
        prompts = [maker.make(task.name, problem) for problem in problems]
        self.codec.check_round_trip(prompt.text for prompt in prompts)
        lengths = sorted(len(prompt.token_ids) // 4 for prompt in prompts)
        limit = model_length(self.spec)
        if lengths[0] >= limit:
            raise ValueError(
                f"its first prompts have {lengths[0]} to {lengths[-1]} tokens, and maxModelLength {limit} leaves no "
                "room for an answer; raise it, or make prompts shorter"
            )
        if lengths[-1] >= limit:
            log.warning(
                "task %s: a prompt of %d tokens leaves no room in maxModelLength %d: its samples will fail",
                task.name,
                lengths[-1],
                limit,
            )

    def _check_conversation(self, task: Task, row: dict[str, Any]) -> None:
        """Render the first two observations of a task with an environment."""
        if self.codec is None or (task.messages is not None and self.chat is None):
            return
        PromptMaker({task.name: task}, self.codec, self.chat).make(task.name, row, "observation")
        Conversation(task, self.codec, self.chat, self.codec.stop_token_ids).text(row, "observation")

    def _evaluated(self, task: Task) -> bool:
        return self.spec.evaluation is not None and task.name in (self.spec.evaluation.tasks or [])

    def _made_later(self, source: str) -> bool:
        """Return whether ``source`` does not exist yet, and the initializer or a download will make it."""
        will_make = self._will_initialize if source.startswith(IN_STORAGE) else is_remote(source)
        return will_make and not self._environment.path(source).exists()

    @contextmanager
    def _collecting_problems(self, prefix: str = "") -> Iterator[None]:
        """Add an error that is raised inside to the problems and continue."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.problems.append(f"{prefix}{error}")


def model_length(spec: RLJobSpec) -> int:
    """Return the smaller of the longest sequences, in tokens, that the engines of each purpose (training, evaluation)
    accept."""
    longest: dict[str, int] = {}
    for rollout in spec.policy_pools:
        longest[rollout.purpose] = max(rollout.max_model_length, longest.get(rollout.purpose, 0))
    return min(longest.values())


def _paths(data: TaskData) -> list[str]:
    """Return the files and directories that a task reads."""
    tables = [table for table in (data.jsonl, data.parquet) if table is not None]
    paths = [path for table in tables for path in (table.path, table.held_out_path) if path is not None]
    return paths + ([data.datasets.path] if data.datasets is not None else [])
