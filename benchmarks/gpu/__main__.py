"""`python -m benchmarks.gpu` (`make gpu`): measure all that takes a GPU, in 40 minutes, resumably.

python -m benchmarks.gpu
python -m benchmarks.gpu --parts utilisation profile --output benchmarks/results/mine
python -m benchmarks.gpu --smoke

A second run with the same folder goes on where the first one ended. The exit code is 0 if nothing failed.
"""

import contextlib
import datetime
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import goals, page, runner
from benchmarks.gpu.machine import names, short
from benchmarks.gpu.measurements import PARTS, measurements
from benchmarks.smoke import compile_faster
from jaxddp import cli
from jaxddp.errors import InputError, check_name
from jaxddp.files import check_files

PROG = "python -m benchmarks.gpu"
RESULTS = Path("benchmarks", "results")


@dataclass(frozen=True)
class GpuOptions:
    """Measure all that takes a GPU: rates, parity, precision, tests, speed, utilisation, profile; and make a page."""

    smoke: bool = False
    """Try everything on CPU devices with tiny sizes; the numbers mean nothing."""
    output: Path | None = None
    """Folder of the results. None: benchmarks/results/gpu-DATE-DEVICE; in a smoke run a temporary one."""
    parts: tuple[str, ...] = PARTS
    """machine | parity | precision | tests | benchmark | utilisation | profile. None: only make the page."""
    minutes: float = 40.0
    """Minutes of all parts together."""

    def __post_init__(self) -> None:
        for name in self.parts:
            check_name("--parts", name, PARTS)
        if not self.minutes > 0:
            raise InputError(f"--minutes {self.minutes:g}: must be above 0")
        if self.output is not None and self.output.exists() and not self.output.is_dir():
            raise InputError(f"--output {self.output}: is a file; must be a folder")


def main(argv: Sequence[str]) -> int:
    """Measure the parts and make the page; return the exit code."""
    with cli.one_line_errors(show_traceback=False):
        options = cli.parse_plain(GpuOptions, argv, PROG)
        gpus = names()
        if options.parts and not options.smoke and not gpus:
            raise InputError("no GPU: nvidia-smi lists none here; --smoke tries everything on CPU devices")
        if options.smoke:
            compile_faster()
        with _folder(options, gpus) as folder:
            folder.mkdir(parents=True, exist_ok=True)
            check_files({"--output": (folder / page.NAME, page.MARK), "results": (folder / runner.NAME, runner.MARK)})
            chosen = [one for one in measurements(folder, options.smoke, len(gpus)) if one.part in options.parts]
            record = runner.run(folder, chosen, options.minutes, options.smoke)
            page.write(folder, record)
            print(*goals.lines(record.rows), sep="\n")
            kept = options.output is not None or not options.smoke
            print(f"results: {folder / page.NAME}" if kept else "no results are kept; --output FOLDER keeps them")
    return 1 if record.failures(options.parts) else 0


@contextlib.contextmanager
def _folder(options: GpuOptions, gpus: Sequence[str]) -> Iterator[Path]:
    """Yield the folder of the results; remove that of a smoke run at the end."""
    if options.output is not None:
        yield options.output
    elif options.smoke:
        folder = Path(tempfile.mkdtemp(prefix="gpu-smoke-"))
        yield folder
        shutil.rmtree(folder)
    else:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        yield RESULTS / f"gpu-{date}-{short(gpus)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
