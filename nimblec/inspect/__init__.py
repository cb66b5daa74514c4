"""What a plan holds, as facts, a timeline, a trace and a graph."""
