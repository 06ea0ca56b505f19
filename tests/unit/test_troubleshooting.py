"""docs/troubleshooting.md quotes messages that the code prints."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
# Words of the page -> the file that prints them.
QUOTED = {
    "Its input already differs (": "jaxddp/parity/report/words.py",
    "Its input is equal": "jaxddp/parity/report/words.py",
    "All layers in it are equal": "jaxddp/parity/report/words.py",
    ", first at step ": "jaxddp/parity/report/words.py",
    "equal, but the port drifts from the reference when it runs on its own": "jaxddp/parity/compare/free_running.py",
    "different in rounding": "jaxddp/parity/report/words.py",
    " from its float64 run, the other side ": "jaxddp/parity/compare/numerics.py",
    "rounded_to_16_bits": "jaxddp/parity/diagnosis/rounding.py",
    "the first non-finite value arises before layer ": "jaxddp/parity/diagnosis/not_finite.py",
    "he loss is finite, so they arise in its derivative": "jaxddp/parity/diagnosis/not_finite.py",
    "the loss is not a finite number, nor is jax's": "jaxddp/parity/diagnosis/not_finite.py",
    "--detect-anomaly names the parameter and the replica, and the example if": "jaxddp/tracking/gradient_metrics.py",
    "perhaps, in the program (--write-names writes it there):": "jaxddp/parity/report/console.py",
    " may be in several places in torch": "jaxddp/parity/jax_side/twins.py",
    "must be of one kind and size, in the same order": "jaxddp/parity/port/draws.py",
    "it is drawn inside of a jit, scan, vmap or remat of the port": "jaxddp/parity/jax_side/draws.py",
    " numbers can be the same on both sides": "jaxddp/parity/jax_side/draws.py",
    "Ended early by ": "jaxddp/parity/report/words.py",
    "not all causes were tried": "jaxddp/parity/diagnosis/as_differences.py",
    ", as when memory is used up": "jaxddp/parity/processes.py",
    "error: not enough memory: ": "jaxddp/cli/errors.py",
    " million parameters takes about ": "jaxddp/parity/runs.py",
    "no answer for ": "jaxddp/parity/processes.py",
    " s (--stall-timeout)": "jaxddp/distributed/stall.py",
    "; what each thread is doing:": "jaxddp/distributed/stall.py",
    "every replica keeps its own gradient": "jaxddp/parity/report/sentences_of_steps.py",
    "replicas differ at step ": "jaxddp/distributed/verify.py",
    "a resumed run reads it from its start, and skips what it has used": "jaxddp/data/sources/stream.py",
    " instead of its default": "jaxddp/config/config.py",
    "restoring after step ": "jaxddp/parity/report/sentences_of_optimizers.py",
    " limits: the input takes ": "jaxddp/tracking/throughput.py",
    "the model pools with lax.reduce_window, which is slow on CPU": "jaxddp/step/loops.py",
    "the model computes convolutions in a loop, which is slow on CPU": "jaxddp/step/loops.py",
    "jax does not use ": "jaxddp/doctor.py",
    "--platform gpu: jax finds no GPU here; install jax[cuda12]": "jaxddp/distributed/devices.py",
}


@pytest.mark.parametrize("words", QUOTED)
def test_the_page_quotes_what_the_code_prints(words: str) -> None:
    assert words in PAGE
    assert words in (ROOT / QUOTED[words]).read_text()
