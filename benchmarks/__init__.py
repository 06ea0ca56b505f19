"""How fast jaxddp trains, next to torch and to jax written by hand."""
