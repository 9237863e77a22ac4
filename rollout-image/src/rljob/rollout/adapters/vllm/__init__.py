"""vLLM: its adapter and client in the agent, and what runs in the processes of its server.

In the agent: ``adapter`` and ``client``. In the server: ``main``, ``server_key``, ``receiver`` and
``expected_warnings``.
"""
