"""The contents of a plan as facts, a timeline, a trace and a graph."""
