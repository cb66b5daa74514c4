"""Pools of processes: one for each device, called through shared memory."""
