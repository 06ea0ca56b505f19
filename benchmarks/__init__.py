"""Speed of jaxddp compared with torch and with hand-written jax."""
