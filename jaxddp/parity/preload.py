"""Imports that take seconds, made once for all children of a check, which are forked from a process that made them."""

import gc
from importlib import import_module

gc.disable()  # imports leave little garbage, and looking for it takes a fifth of their time
import_module("torch._dynamo")  # for torch's optimizers
import_module("jaxddp.parity.checking")
gc.freeze()  # nor do the children look there
gc.enable()
