"""Downloads a model from the Hugging Face Hub with huggingface_hub (https://huggingface.co/docs/huggingface_hub).

The address is HF_ENDPOINT, the token HF_TOKEN or the file in HF_TOKEN_PATH (by default that of `hf auth login`), as for
every program that uses huggingface_hub.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from rljob.api.model_address import HubModel
from rljob.protocol.full_disk import FULL_DISK
from rljob.protocol.model_cache import ModelUnavailableError, choose_files

log = logging.getLogger(__name__)

TOKEN_REMEDY = "give a token that may read it: HF_TOKEN for rljob run, in a cluster the Secret in spec.downloads.secret"
PERMANENT = range(400, 500)
LIMITED = 429
SECONDS = 30.0
CONNECTIONS = 4


class HubDownload:
    """See :class:`rljob.protocol.model_cache.ModelDownload`. A version is a commit."""

    def __init__(self, model: HubModel) -> None:
        self._model = model
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._api = HfApi(endpoint=self._endpoint)

    def version(self) -> str:
        """Return the commit of the revision."""
        with self._explained_errors():
            info = self._api.model_info(self._model.repository, revision=self._model.revision, timeout=SECONDS)
        if not info.sha:
            raise ValueError(f"{self._endpoint} names no commit of {self._model.repository}; give another hubEndpoint")
        return info.sha

    def download(self, version: str, cache: Path | None) -> Path:
        """Download the files of a commit. Each file is complete when it gets its name."""
        disable_progress_bars()
        directory = Path(constants.HF_HUB_CACHE) if cache is None else cache / "hub"
        repository = self._model.repository
        with self._explained_errors(directory):
            info = self._api.model_info(repository, revision=version, files_metadata=True, timeout=SECONDS)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
            names = choose_files(sizes)
            _check_room(directory, sum(sizes[name] for name in names))
            size = sum(sizes[name] for name in names) / 1e9
            log.info("downloading %d files of %s (%.2f GB) from %s", len(names), repository, size, self._endpoint)
            patterns = [name.replace("[", "[[]") for name in names]
            path = Path(
                snapshot_download(
                    repository,
                    revision=version,
                    cache_dir=directory,
                    allow_patterns=patterns,
                    endpoint=self._endpoint,
                    max_workers=CONNECTIONS,
                )
            )
        for name in names:
            if not (path / name).is_file() or (path / name).stat().st_size != sizes[name]:
                raise ModelUnavailableError(f"{name} of {repository} was not downloaded completely; try again")
        return path

    @contextmanager
    def _explained_errors(self, directory: Path | None = None) -> Iterator[None]:
        """Turn the errors of huggingface_hub into sentences."""
        try:
            yield
        except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, HfHubHTTPError):
                raise self._refused(cause) from error
            raise self._unreachable(cause) from error
        except HfHubHTTPError as error:
            raise self._refused(error) from error
        except HFValidationError as error:
            raise ValueError(f"{self._model.repository} is not a name of the Hub ({error}); correct it") from error
        except (HTTPError, ConnectionError, TimeoutError) as error:
            raise self._unreachable(error) from error
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise ModelUnavailableError(f"the model does not fit the disk of {directory}; make room there") from error

    def _refused(self, error: HfHubHTTPError) -> Exception:
        """Return the error for a response of the Hub. The Hub also answers 401 for a repository that does not exist."""
        repository, status = self._model.repository, error.response.status_code
        if isinstance(error, RevisionNotFoundError):
            revision = self._model.revision
            return ValueError(f"{repository} has no revision {revision!r} ({self._endpoint}); correct it after @")
        if isinstance(error, GatedRepoError) or status == 403:
            return ValueError(f"{self._endpoint} refuses access to {repository} ({status}); {TOKEN_REMEDY}")
        if status == 401:
            return ValueError(
                f"{self._endpoint} has no model {repository}, or refuses access to it ({status}); correct the name, or "
                f"{TOKEN_REMEDY}"
            )
        if isinstance(error, RepositoryNotFoundError) or status == 404:
            return ValueError(
                f"{self._endpoint} has no model {repository} ({status}); correct the name, or if it is private "
                f"{TOKEN_REMEDY}"
            )
        if status in PERMANENT and status != LIMITED:
            return ValueError(f"{self._endpoint} refuses the download of {repository} ({_first_line(error)})")
        return ModelUnavailableError(f"{self._endpoint} fails ({_first_line(error)}); try again later")

    def _unreachable(self, cause: BaseException) -> ModelUnavailableError:
        return ModelUnavailableError(
            f"{self._endpoint} cannot be reached ({_first_line(cause)}); check the network, or give a mirror in "
            "spec.downloads.hubEndpoint"
        )


def _check_room(directory: Path, needed: int) -> None:
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise ModelUnavailableError(
            f"its {needed / 1e9:.1f} GB do not fit the disk of {directory} with {free / 1e9:.1f} GB free; make room"
        )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return re.sub(r"\?[^\s'\"]*", "", lines[0].strip())  # a signed address has its signature in the query
