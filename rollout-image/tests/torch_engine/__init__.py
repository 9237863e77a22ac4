"""A complete engine in two files; test_conformance.py runs it as a user's package outside the repository."""
