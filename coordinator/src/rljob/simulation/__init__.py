"""Runs the production coordinator and runner in virtual time, with simulated engines, rewards and trainer."""
