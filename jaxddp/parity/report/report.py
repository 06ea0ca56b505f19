"""Report of a check: findings with a text form for terminals and an HTML form for notebooks."""

from jaxddp.parity.findings import Findings
from jaxddp.parity.report.console import to_text
from jaxddp.parity.report.page import notebook


class Report(Findings):
    """Findings of a check that print as text, and as HTML in a notebook.

    >>> print(Report("port.py", 2, 10, "float64"))
    port.py  ·  2 replicas x 10 steps  ·  float64
    <BLANKLINE>
    incomplete: Nothing was compared.
    """

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return notebook(self)
