"""Compare the records of both sides, stage by stage and tensor by tensor. NumPy only."""
