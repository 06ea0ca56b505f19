"""JAX side of a parity check: the replica step of jaxddp or of a port, recorded stage by stage."""
