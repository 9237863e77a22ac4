"""Scheduling decisions on plain data: no I/O and no clock, so tests run in virtual time."""
