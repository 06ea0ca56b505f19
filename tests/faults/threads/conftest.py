"""Leave the programs out of pytest's collection: each imports its own neighbours."""

collect_ignore = ["programs"]
