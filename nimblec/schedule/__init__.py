"""Scheduling and memory planning: pure functions from one frozen value to another, for both targets."""
