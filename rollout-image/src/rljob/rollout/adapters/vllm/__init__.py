"""vLLM: its adapter and client in the agent, and what runs in the processes of its server.

In the agent: ``adapter``, ``check_arguments`` and ``vllm_client``. In the server: ``main``, ``server_key``,
``update_routes``, ``weight_transfer`` and ``expected_warnings``.
"""
