"""Devices, replicas, collectives, and the check that replicas are identical."""
