"""Implementations that cannot be used."""
