"""A server with models that speaks the part of the Hugging Face Hub's protocol by which huggingface_hub downloads a
snapshot: https://huggingface.co/docs/hub/api, and the headers of /resolve."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web


@dataclass
class FakeHub:
    """The models, and what was requested. ``files``: (repository, commit) → name → content. ``revisions``: (repository,
    branch) → commit. ``token``: required if it is set. ``refused``: names of files that are answered with 403."""

    url: str = ""
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    token: str = ""
    gated: bool = False
    refused: set[str] = field(default_factory=set)
    downloads: Counter[str] = field(default_factory=Counter)

    def add(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch; return the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[repository, commit] = files
        self.revisions[repository, branch] = self.revisions[repository, commit] = commit
        return commit

    def add_directory(self, repository: str, directory: Path) -> str:
        """Add the files of a directory to the branch main; return the commit."""
        return self.add(repository, {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()})

    async def info(self, request: web.Request) -> web.Response:
        """Answer /api/models/ORG/NAME/revision/REV."""
        repository = f"{request.match_info['org']}/{request.match_info['name']}"
        if problem := self._problem(request, repository):
            return problem
        commit = self.revisions.get((repository, request.match_info["revision"]))
        if commit is None:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files[repository, commit].items()]
        return web.json_response({"id": repository, "sha": commit, "siblings": siblings})

    async def tree(self, request: web.Request) -> web.Response:
        """Answer /api/models/ORG/NAME/tree/COMMIT."""
        repository = f"{request.match_info['org']}/{request.match_info['name']}"
        files = self.files[repository, request.match_info["revision"]]
        return web.json_response(
            [{"type": "file", "path": name, "size": len(data), "oid": _etag(data)} for name, data in files.items()]
        )

    async def resolve(self, request: web.Request) -> web.Response:
        """Answer HEAD and GET of /ORG/NAME/resolve/COMMIT/FILE."""
        repository = f"{request.match_info['org']}/{request.match_info['name']}"
        commit, name = request.match_info["revision"], request.match_info["file"]
        if problem := self._problem(request, repository):
            return problem
        if name in self.refused:
            return web.Response(status=403)
        data = self.files[repository, commit][name]
        if request.method == "GET":
            self.downloads[name] += 1
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        return web.Response(body=data, headers=headers)

    def _problem(self, request: web.Request, repository: str) -> web.Response | None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            code = "GatedRepo" if self.gated else "RepoNotFound"
            return web.Response(status=403 if self.gated else 401, headers={"X-Error-Code": code})
        if not any(known == repository for known, _ in self.files):
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        return None


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """Serve a FakeHub on loopback in a thread."""
    hub, loop, ready = FakeHub(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", hub.info)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision}", hub.tree)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{file:.*}", hub.resolve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    task = loop.create_task(serve())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
