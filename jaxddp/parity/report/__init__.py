"""Forms of a check's report: text for a terminal, an HTML page, a notebook cell, and JSON.

Each form is a function of `jaxddp.parity.findings.Findings` alone.
"""
