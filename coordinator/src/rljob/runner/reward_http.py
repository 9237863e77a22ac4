"""One request to one replica of a reward service, and what its outcome means."""

from __future__ import annotations

import logging
from collections.abc import Collection

import aiohttp
from yarl import URL

from rljob.protocol.retry_after import retry_after_seconds
from rljob.protocol.score_messages import MAX_SCORE_BYTES
from rljob.runner.service_http import (
    CONNECT_SECONDS,
    AvailabilityLog,
    addresses_of,
    at,
    at_replica,
    has_name,
    one_line,
    read_at_most,
)
from rljob.runner.service_replicas import Replica

log = logging.getLogger(__name__)

RETRY_STATUSES = (408, 425, 429)
REFUSAL_BYTES = 200  # of the body of a reply with another status than 200


class RefusedSampleError(Exception):
    """The service refuses a request, or it cannot be sent."""


class ServiceFailedError(Exception):
    """The service accepted the request and failed on it: it died, hung, answered HTTP 500, or no scores."""


class RewardUnavailableError(Exception):
    """The service did not accept the request: it cannot be reached, or it is busy."""


class RewardHttp:
    """Requests to the replicas of one service.

    Args:
        name: of the reward, for messages.
        url: address of the service.
        session: see :func:`rljob.runner.service_http.service_session`.
        token: sent with every request; empty: none.
    """

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession, token: str) -> None:
        self._name = name
        self._url = URL(url.rstrip("/") + "/v1/score")
        self._health = f"{url.rstrip('/')}/healthz"
        self._session = session
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._availability = AvailabilityLog(f"reward {name}")

    @property
    def has_name(self) -> bool:
        """Whether the address of the service has a name, which may stand for several replicas."""
        return has_name(self._url)

    async def addresses(self) -> Collection[str]:
        """Return the addresses of the service's name.

        Raises:
            OSError: it has none.
        """
        return await addresses_of(self._url)

    async def post(self, replica: Replica, body: bytes, samples: int, seconds: float) -> bytes:
        """Return the reply to a request.

        Args:
            replica: gets the request, and learns the outcome; the caller says whether a reply is one.
            body: of the request.
            samples: in the request; they bound the reply.
            seconds: limit.

        Raises:
            RewardUnavailableError: the replica did not accept the request.
            RefusedSampleError: it rejects the request.
            ServiceFailedError: it accepted the request and died, hung, or answered HTTP 500.
        """
        url, host = at_replica(self._url, replica.address)
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.post(
                url, data=body, headers=self._headers | host, timeout=limit, allow_redirects=False
            ) as response:
                status, replied = response.status, response.headers
                longest = samples * MAX_SCORE_BYTES if status == 200 else REFUSAL_BYTES
                answer = await read_at_most(response.content, longest + 1)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            replica.failed()
            raise RewardUnavailableError(self._availability.report(replica.address, str(error))) from None
        except TimeoutError:
            replica.failed()
            raise ServiceFailedError(
                self.report_failure(replica.address, f"did not answer within {seconds:.0f} s")
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            replica.failed()
            raise ServiceFailedError(self.report_failure(replica.address, f"broke the connection ({error})")) from None
        if status > 500 or status in RETRY_STATUSES:
            if status > 500:
                replica.failed()
            replica.pause(retry_after_seconds(replied.get("Retry-After")))
            why = one_line(answer[:REFUSAL_BYTES])
            raise RewardUnavailableError(
                self._availability.report(replica.address, f"HTTP {status}" + (f": {why}" if why else ""))
            )
        summary = f"HTTP {status}: {one_line(answer[:REFUSAL_BYTES])}"
        if status == 500:
            replica.failed()
            raise ServiceFailedError(self.report_failure(replica.address, f"answered {summary}"))
        self._availability.report(replica.address, "")
        if status == 200 and len(answer) <= longest:
            return answer
        replica.succeeded()
        raise RefusedSampleError(self._refusal(status, summary, longest, replied.get("Location", "")))

    async def is_reachable(self) -> bool:
        """Return whether a server answers at the service's address; log the first failure and the end of them."""
        limit = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with self._session.get(self._health, timeout=limit, allow_redirects=False) as response:
                ok = response.status < 500  # a user's service may not have this path
                self._availability.report("", "" if ok else f"HTTP {response.status}")
                return ok
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._availability.report("", str(error) or type(error).__name__)
            return False

    def _refusal(self, status: int, summary: str, longest: int, location: str) -> str:
        """Return why a reply is not an answer to its request, as one sentence."""
        if status == 200:
            return f"reward {self._name} answered more than {longest:,} bytes; shorten its metrics"
        if status in (401, 403):
            if "Authorization" in self._headers:
                return f"reward {self._name} refused the run's token ({summary}); it must accept its RLJOB_TOKEN"
            return f"reward {self._name} requires a token ({summary}); rljob sends none to a reward with url"
        if 300 <= status < 400:
            where = one_line(location.encode(errors="replace")[:REFUSAL_BYTES])
            return (
                f"reward {self._name} redirects to {where or 'no address'} (HTTP {status}); redirects are not followed"
            )
        return f"reward {self._name} refused the sample: {summary}"

    def report_failure(self, address: str, what: str) -> str:
        """Log that a replica failed on a request; return it."""
        log.warning("reward %s%s %s; asking again, one sample at a time", self._name, at(address), what)
        return what
