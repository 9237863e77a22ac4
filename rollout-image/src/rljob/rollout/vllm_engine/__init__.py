"""What runs inside the processes of a vLLM server: its entry point, its middleware and the weight receiver."""
