"""What a reader sees of a check: lines for a terminal, a page, a notebook's cell, and the JSON file.

Every form is a function of `jaxddp.parity.findings.Report` and of nothing else.
"""
