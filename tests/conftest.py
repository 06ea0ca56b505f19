"""Makes jax strict, and gives every test the same eight CPU devices."""

import jax

from jaxddp.devices import prepare

# A tensor that meets one of another rank is a mistake here, not a convenience.
jax.config.update("jax_numpy_rank_promotion", "raise")
prepare(8, "cpu")
