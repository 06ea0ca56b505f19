"""`jaxddp check`: check a port, or jaxddp's own models, against PyTorch."""

import fnmatch
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from jaxddp import cli
from jaxddp.cli.flags import parse_known, parse_plain
from jaxddp.config.options import Platform
from jaxddp.errors import InputError, check_name, on_one_line
from jaxddp.files import check_files, write_atomically
from jaxddp.parity.findings import EXIT_CODES, Problem
from jaxddp.parity.port.loading import check_flags_of_port
from jaxddp.parity.port.names_block import with_names
from jaxddp.parity.processes import import_quickly, start_imports
from jaxddp.parity.report import words
from jaxddp.parity.report.console import Row, table
from jaxddp.parity.report.json_form import MARK as JSON
from jaxddp.parity.report.json_form import to_json
from jaxddp.parity.report.page import MARK as PAGE
from jaxddp.parity.report.page import to_html
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.terminal import show
from jaxddp.parity.stopping import Stop, Stopped

if TYPE_CHECKING:
    from jaxddp.parity.cases import NamedCase
    from jaxddp.parity.workers import Workers

PROG = "jaxddp check"
MOST_REPLICAS = 64  # each is a torch process of 180 MB
DIFF = b"# jaxddp.parity --patch\n"  # patch and git apply skip what is before a diff


@dataclass(frozen=True)
class CheckOptions:
    """Check that a JAX port trains exactly like its PyTorch original, and name the cause if it does not.

    PROGRAM.py has both halves; it is executed. Its options and the trainer's flags may follow: --layers 2 --lr 0.1.
    Without it, jaxddp's own models are checked. Ctrl-C, SIGTERM and --time-limit end the check early, with a report on
    what was found until then. Exit code 0: equal, or different only beyond the run; 1: different; 2: could not be
    checked.
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        *("port", "devices", "steps", "total_steps", "quick", "strict", "patch", "write_names", "report", "json"),
        *("dtype", "platform", "only", "time_limit"),
    )

    port: Annotated[Positional[Path | None], arg(metavar="[PROGRAM.py]")] = None
    """Program with the torch and the jax half. None: jaxddp's own models."""
    devices: int = 2
    """Number of replicas on each side, one per device."""
    steps: int = 10
    """Number of optimizer steps."""
    total_steps: int | None = None
    """Optimizer steps of the whole training, up to which both sides' learning rates must be equal. None: as the file
    says, or torch's scheduler shows."""
    dtype: Literal["both", "float64"] = "both"
    """float64 compares semantics; both also compares rounding in float32 (programs only)."""
    only: str | None = None
    """Check those of jaxddp's own models whose line contains or matches this: "convnet", "mlp*adam*x2". None: all."""
    json: Path | None = None
    """Write all findings to this JSON file. None: they are not written."""
    report: Path | None = None
    """Write the report to this file, as a self-contained HTML page with plots. None: it is not written."""
    platform: Platform | None = None
    """Platform of the jax side. None: gpu if there are any."""
    torch_platform: Platform = "cpu"
    """Platform of the torch side; its ranks may share a GPU."""
    num_processes: int = 1
    """Number of processes that share jax's replicas, on CPU devices, as on several machines."""
    patch: Path | None = None
    """Look for edits of the JAX side that remove the differences, and write those that do to this file, as a diff.
    None: edits are not looked for."""
    strict: bool = False
    """Exit with 1 also if the port differs beyond the run or in what it starts from, unless its `intended` names it."""
    write_names: bool = False
    """If names do not map, write the proposed table into PROGRAM.py, and check again."""
    quick: bool = False
    """Compare only the run, types and rates: no initialisation, no evaluation, and nothing beyond the run."""
    seed: int = 0
    """Seed from which torch draws the weights of a port."""
    stall_timeout: float = 300.0
    """Seconds without a message after which a side counts as hanging."""
    time_limit: float | None = None
    """Seconds after which the check ends early. None: never."""

    def __post_init__(self) -> None:
        for name in ("devices", "steps", "total_steps", "stall_timeout", "num_processes", "time_limit"):
            if getattr(self, name) is not None and not getattr(self, name) >= 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.devices > MOST_REPLICAS:
            raise InputError(f"--devices {self.devices}: must be at most {MOST_REPLICAS} (one process each)")
        check_name("--dtype", self.dtype, ("both", "float64"))
        if self.platform is not None:
            check_name("--platform", self.platform, ("cpu", "gpu"))
        check_name("--torch-platform", self.torch_platform, ("cpu", "gpu"))
        if self.devices % self.num_processes:
            raise InputError(f"--num-processes {self.num_processes}: must divide --devices {self.devices}")
        if self.only is not None and self.port is not None:
            raise InputError(f"--only {self.only}: selects jaxddp's own models; must not be given with PROGRAM.py")
        if self.write_names and self.port is None:
            raise InputError("--write-names: must be given with PROGRAM.py")
        if self.patch is not None and self.port is None:
            raise InputError(f"--patch {self.patch}: must be given with PROGRAM.py")
        if self.port is not None and not self.port.is_file():
            raise InputError(f"{self.port}: {'must be a file, not a folder' if self.port.is_dir() else 'no such file'}")
        check_files({"--json": (self.json, JSON), "--report": (self.report, PAGE), "--patch": (self.patch, DIFF)})


def main(
    options: CheckOptions, flags: Sequence[str] = (), show_traceback: bool = False, began: float | None = None
) -> int:
    """Check, print and write the reports; return the exit code.

    Args:
        flags: those of a program, see `jaxddp.parity.check`.
        show_traceback: print the traceback of each error of a port.
        began: when the time limit began, by `time.monotonic`; None: now.
    """
    start_imports()  # they take as long as this process's
    stop = Stop(options.time_limit, began=began)
    with stop.listening(signal.SIGINT, signal.SIGTERM):
        with suppress(Stopped), stop.raising():
            import_quickly("jaxddp.parity.checking")
        return _main(options, flags, show_traceback, stop)


def _main(options: CheckOptions, flags: Sequence[str], show_traceback: bool, stop: Stop) -> int:
    unusable: list[Problem] = []
    if options.port is None:
        reports = _check_builtin(options, stop)
    else:
        reports = [_check_port(options, flags, stop)]
        unusable = [problem for problem in reports[0].problems if (problem.side, problem.where) == ("port", "file")]
        if not unusable:
            show(str(reports[0]))
        if options.write_names and (reports[0].names or reports[0].no_twin) and not stop.why:
            _write_names(options.port, reports[0])
            if any(problem.where == "draws" for problem in reports[0].problems):
                print("not checked again: the draws have no partner yet")
            else:
                reports = [_check_port(options, flags, stop)]
                show(f"\n{reports[0]}")
    if show_traceback:
        for problem in (problem for report in reports for problem in report.problems if problem.trace):
            print(f"\n{problem.side}: {problem.where}: {problem.trace}", file=sys.stderr)
    if options.patch is not None and options.port is not None:
        _write_patch(options.patch, options.port, reports[0])
    if options.json is not None:
        texts = [to_json(report).strip() for report in reports]
        text = texts[0] if options.port is not None else f"[{', '.join(texts)}]"
        write_atomically(options.json, f"{text}\n".encode())
    if options.report is not None:
        write_atomically(options.report, to_html(reports[0]).encode())
        print(f"report: {options.report}")
    if unusable:
        raise InputError(unusable[0].message, unusable[0].frames)
    codes = {report.exit_code(options.strict) for report in reports}
    return next(code for code in (EXIT_CODES["different"], EXIT_CODES["incomplete"], 0) if code in codes)


def _check_port(options: CheckOptions, flags: Sequence[str], stop: Stop) -> Report:
    assert options.port is not None
    if stop.why:  # during the imports
        sizes, seconds = (options.devices, options.steps, "float64"), options.time_limit or 0.0
        return Report(str(options.port), *sizes, ended=stop.why, untried=("imports, and the check",), seconds=seconds)
    from jaxddp.parity.checking import check

    return check(
        options.port,
        world_size=options.devices,
        steps=options.steps,
        seed=options.seed,
        platform=options.platform,
        torch_platform=options.torch_platform,
        stall_timeout=options.stall_timeout,
        num_processes=options.num_processes,
        numerics=options.dtype == "both",
        time_limit=stop,
        flags=flags,
        patch=options.patch is not None,
        quick=options.quick,
        total_steps=options.total_steps,
    )


def _write_patch(path: Path, port: Path, report: Report) -> None:
    """Write the patches that were verified, and say how to apply them; or say why the file is not written."""
    if report.patch:
        write_atomically(path, DIFF + report.patch.encode())
        print(f"patch: {path}; apply it with: patch -p1 -d {port.parent} < {path}")
        return
    differs = report.differences or any(aspect.verdict == "differs" for aspect in report.aspects.values())
    why = "no edit was verified" if differs else "nothing differs"
    print(f"patch: {path} is not written: {why}")


def _write_names(port: Path, report: Report) -> None:
    """Write the proposed statements into the program."""
    text = with_names(port.read_text(encoding="utf-8"), report.names, report.no_twin)
    write_atomically(port.resolve(), text.encode())
    print(f"names: written into {port}")


def _check_builtin(options: CheckOptions, stop: Stop) -> list[Report]:
    """Check jaxddp's own models, and print a line for each as soon as it is checked."""
    if stop.why:
        raise InputError(f"{stop.why}: ended the imports; nothing was checked")
    from jaxddp.parity.cases import builtin_cases
    from jaxddp.parity.checking import check
    from jaxddp.parity.workers import Workers

    pattern = options.only or "*"
    if not set(pattern) & set("*?["):
        pattern = f"*{pattern}*"
    every = builtin_cases(options.devices, options.steps)
    cases = [named for named in every if fnmatch.fnmatch(named.name, pattern)]
    if not cases:
        known = ", ".join(named.name for named in every)
        raise InputError(f"--only {options.only}: matches none of {known}")
    if options.report is not None and len(cases) > 1:
        raise InputError(f"--report {options.report}: holds one check, not {len(cases)}; select one with --only")
    reports: list[Report] = []

    def rows(workers: "Workers") -> Iterator[Row]:
        for named in cases:
            reports.append(check(named.case, numerics=False, time_limit=stop, workers=workers))
            yield _row(named, reports[-1])
            if stop.why:
                return

    world_size = max(named.case.world_size for named in cases)
    others = options.platform, options.stall_timeout, options.torch_platform
    with Workers(world_size, *others, options.num_processes) as workers:
        for line in table(rows(workers)):
            print(line, flush=True)
    untried = (*reports[-1].untried, *(named.name for named in cases[len(reports) :]))
    if stop.why and untried:
        reports[-1] = replace(reports[-1], ended=stop.why, untried=untried)
        print(f"incomplete: {words.ended(reports[-1])}")
    for problem in dict.fromkeys(problem for report in reports for problem in report.problems):
        print(on_one_line(f"problem: {problem}"))
    return reports


def _row(named: "NamedCase", report: Report) -> Row:
    config = named.case.config
    worst = {stage: max(result.residuals) for stage, result in report.stages.items() if result.residuals}
    return Row(
        config.model, config.optimizer, named.feature, named.case.world_size, worst, report.verdict, report.seconds
    )


def parse(argv: Sequence[str]) -> tuple[CheckOptions, list[str]]:
    """Parse the flags of the check; return those of a program too, which is loaded here only if there are some.

    Raises:
        InputError: a flag is unknown to both, or has a bad value.
    """
    if not argv or argv[0].startswith("-"):
        return parse_plain(CheckOptions, argv, PROG), []
    options, flags = parse_known(CheckOptions, argv, PROG)
    if flags:
        check_flags_of_port(argv[0], flags, lambda: parse_plain(CheckOptions, argv, PROG))
    return options, flags


def run(argv: Sequence[str], began: float | None = None) -> None:
    """Run the command line, and exit with its code; an error of the check itself is not "different", which is 1."""
    show_traceback = "--traceback" in argv
    try:
        with cli.one_line_errors(show_traceback):
            words = [word for word in argv if word != "--traceback"]
            sys.exit(main(*parse(words), show_traceback, began))
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_CODES["incomplete"])
