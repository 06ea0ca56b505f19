"""Search for faults: what a replay can plant, how values are fitted, and the rule for naming a cause."""
