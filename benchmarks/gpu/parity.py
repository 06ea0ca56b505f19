"""`jaxddp check` with jax and torch on the GPU."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import FAILURE
from jaxddp.parity.report.json_form import from_json
from jaxddp.parity.report.report import Report

EQUAL_OR_DIFFERENT = (0, 1)  # exit codes of a check that could be made


def measure(flags: Sequence[str], output: str) -> dict[str, Any]:
    """Run a check, and summarize its reports.

    Args:
        flags: flags of the command.
        output: file for its reports.

    Raises:
        subprocess.CalledProcessError: the check could not be made.
    """
    done = subprocess.run([sys.executable, "-m", "jaxddp.parity", *flags, "--json", output])
    if done.returncode not in EQUAL_OR_DIFFERENT:
        done.check_returncode()
    texts = json.loads(Path(output).read_text())
    return summary([from_json(json.dumps(of_case)) for of_case in (texts if isinstance(texts, list) else [texts])])


def summary(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the verdicts and the largest residuals of some reports, and of ports the rounding in float32."""
    cases = [
        {
            "name": report.port,
            "verdict": report.verdict,
            "residuals": {name: max(stage.residuals) for name, stage in report.stages.items() if stage.residuals},
            "rounding": {name: vars(rounding) for name, rounding in report.numerics.items()},
        }
        for report in reports
    ]
    row: dict[str, Any] = {"cases": cases}
    wrong = [report.port for report in reports if report.verdict != "equal"]
    return row | ({FAILURE: f"{len(wrong)} of {len(cases)} checks are not equal: {wrong[0]}"} if wrong else {})
