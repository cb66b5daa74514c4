"""Calls, independent of the target: entries, sizes, inputs and outputs, bindings, state, locks."""
