"""Check the ports whose reports stand in docs/reports, and write these anew: `python docs/reports.py [gpt ...]`.

The pages share one stylesheet, where those of `jaxddp check --report` stand by themselves.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxddp.files import write_atomically
from jaxddp.parity import check
from jaxddp.parity.report.page import to_html

FOLDER = Path(__file__).parent / "reports"


def main(names: Sequence[str]) -> None:
    """Write the reports of these ports; none: all."""
    for name in names or sorted(path.stem for path in FOLDER.glob("*.html")):
        report = check(Path("examples", "ports", f"{name}.py"))
        write_atomically(FOLDER / f"{name}.html", to_html(report, "style.css").encode())
        print(f"{name}: {report.verdict}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
