"""Inference engines: one folder per built-in engine, with its adapter and what runs in its server's processes."""
