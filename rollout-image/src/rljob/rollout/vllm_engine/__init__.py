"""What runs inside the processes of a vLLM server: its entry point, its guard and the weight receiver."""
