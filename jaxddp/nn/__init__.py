"""Layers, losses and autocast with torch's semantics, modules as pure functions, weights under torch's names."""
