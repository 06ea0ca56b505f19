"""Diagnose updates: which change of the reference optimizer's recipe reproduces the port's updates?"""
