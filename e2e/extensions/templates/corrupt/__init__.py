"""Engines whose second update is corrupted on its way: the page's engine, and vLLM."""
