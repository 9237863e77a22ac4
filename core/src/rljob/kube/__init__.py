"""Access to the Kubernetes API for operator, coordinator and CLI: credentials, clients, errors.

`client` is asynchronous (aiohttp), `sync_client` synchronous (http.client, imports in milliseconds). Both raise the
errors of `errors`. Packages that use this one add only their own subject: fencing and caches, the RLJob's client, user
messages.
"""
