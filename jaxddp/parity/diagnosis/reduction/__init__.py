"""Diagnose gradients: which change of the reduction or the clipping reproduces the port's gradients?"""
