"""Weight transfer between a trainer and an engine: weight groups, rounds and the engine's receiver. Needs torch."""
