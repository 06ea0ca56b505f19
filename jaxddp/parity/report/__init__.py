"""Forms of a check's report: text for a terminal, an HTML page, a notebook cell, and JSON.

Each form depends only on `jaxddp.parity.findings.Findings`.
"""
