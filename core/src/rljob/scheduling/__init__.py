"""Scheduling decisions as plain data: no I/O, no clock, testable in virtual time."""
