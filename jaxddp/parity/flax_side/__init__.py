"""The flax side of a parity check: jaxddp's replica step, or the port's own, recorded stage by stage."""
