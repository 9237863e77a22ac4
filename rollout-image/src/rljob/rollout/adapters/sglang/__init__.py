"""SGLang: its adapter and client in the agent, and what runs in the processes of its server.

In the agent: ``sglang_adapter`` and ``sglang_client``. In a process of the check: ``sglang_arguments``. In the server:
``main`` and, in each process that has weights, ``sglang_scheduler`` and ``sglang_receiver``. ``sglang_orders`` is
shared.
"""
