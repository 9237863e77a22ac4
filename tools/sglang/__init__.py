"""The environment in which the tests run the real SGLang server on a CPU."""
