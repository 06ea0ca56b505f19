"""Devices, replicas, collectives, and the verification that replicas are identical."""
