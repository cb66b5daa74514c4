"""Pools of processes: one for each device, called through shared memory."""

from nimblert.processes.pool import ProcessPool

__all__ = ["ProcessPool"]
