"""HTTP sessions (aiohttp) with the credentials of an access.

They are the only way of asynchronous code to the API server: :class:`~rljob.kube.client.ApiClient` uses one, and the
operator gives one to kopf.
"""

from __future__ import annotations

import aiohttp

from rljob.kube.access import Access
from rljob.kube.proxies import proxy_of


def open_session(access: Access, agent: str) -> aiohttp.ClientSession:
    """Return a session for requests to the API server of ``access``.

    Every request reads the credentials again, so a replaced token needs no new session. After a rejected server
    certificate the authority is read again; if it has changed, the session closes itself, and the caller opens a new
    one.

    Args:
        access: address and credentials: TLS, token, impersonated user, proxy, name in the server's certificate.
        agent: value of the header User-Agent.
    """
    tls = access.security()

    async def authorize(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.headers.update(access.headers())
        request.server_hostname = access.server_name or None
        try:
            return await send(request)
        except aiohttp.ClientConnectorCertificateError:
            if access.reload_authority() or access.tls is not tls:
                await session.close()
            raise

    session = aiohttp.ClientSession(
        # No limit: a watch keeps a connection for minutes. The caller limits requests.
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True, keepalive_timeout=60),
        headers={"Accept": "application/json", "User-Agent": agent},
        middlewares=(authorize,),
        proxy=proxy_of(access) or None,
    )
    return session
