"""Flax side of a parity check: jaxddp's replica step, or a port's own, recorded stage by stage."""
