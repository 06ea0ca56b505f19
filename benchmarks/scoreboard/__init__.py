"""Scoreboard of the parity check: planted faults found and named, false alarms, and mutants of the project."""
