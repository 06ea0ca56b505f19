"""Print the losses and weights of three ways in two frameworks, and check the claims about them."""

from collections.abc import Iterator, Mapping

import jax

from examples.claims import Claim, report
from examples.same_updates import in_jax, in_torch, sharding, verdicts
from examples.same_updates.settings import FRAMEWORKS, WAYS, Case, Options, Record, same_updates
from jaxddp import InputError, prepare

WIDTH = 18  # of a number's column
# float32, where the order of summation differs; with torch's examples JAX's first step is no closer.
FIRST_STEP = 2e-6  # measured: up to 7e-7
LATER = 1e-3  # measured: 1e-5; torch's three ways differ by 6e-6


def main(options: Options) -> int:
    """Print everything; return the number of claims that do not hold."""
    shown = {way: same_updates(options, way, options.devices) for way in WAYS}
    runs = train(options, shown | verdicts.cases(options.devices))
    print("\n".join(table(shown, runs)))
    print(f"\n{sharding.tables(options.frameworks)}\n")
    claims = verdicts.claims(runs, options.devices) + sharding.claims(options.frameworks)
    if len(runs) == len(FRAMEWORKS):
        claims += [verdicts.across(runs, options.devices), sharding.alike(), *printed_alike(shown, runs)]
    return report(claims)


def train(options: Options, cases: Mapping[str, Case]) -> dict[str, dict[str, Record]]:
    """Run the cases in each framework that the options name."""
    runs: dict[str, dict[str, Record]] = {}
    if "jax" in options.frameworks:
        devices = local_devices(options)
        runs["jax"] = {name: in_jax.train(case, devices) for name, case in cases.items()}
    if "torch" in options.frameworks:
        runs["torch"] = in_torch.train_all(cases, options.devices)
    return runs


def table(cases: Mapping[str, Case], runs: Mapping[str, Mapping[str, Record]]) -> Iterator[str]:
    """Yield the numbers of each way, line by line."""
    yield f"{'':44}" + "".join(f"{framework:>{WIDTH}}" for framework in runs)
    for name, case in cases.items():
        yield f"{name}: batch {case.settings.batch_size}, {case.settings.opt}, lr {case.settings.lr:g}"
        columns = [numbers(records[name]) for records in runs.values()]
        for label in columns[0]:
            yield f"  {label:42}" + "".join(f"{column[label]:{WIDTH}.9g}" for column in columns)


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a run, by label."""
    return of_first_step(record) | of_epochs(record)


def of_first_step(record: Record) -> dict[str, float]:
    """Return the numbers of the first step, by label."""
    return {
        "first batch's loss": record.first_loss,
        "first batch's loss, of all processes": record.reduced_loss,
        "gradient [0, 0]": record.gradient,
        "weight [0, 0] before": float(record.weights[0, 0, 0]),
        "weight [0, 0] after": float(record.weights[1, 0, 0]),
    }


def of_epochs(record: Record) -> dict[str, float]:
    """Return the numbers of all epochs, by label."""
    by_label = {}
    for number, epoch in enumerate(record.epochs, start=1):
        by_label[f"epoch {number}: loss, mean of {epoch.steps} steps"] = epoch.loss
        by_label[f"epoch {number}: accuracy, %"] = epoch.accuracy
    return by_label


def furthest(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Return the largest relative difference of any number."""
    return max(abs(ours[name] - value) / (abs(value) or 1) for name, value in theirs.items())


def printed_alike(shown: Mapping[str, Case], runs: Mapping[str, Mapping[str, Record]]) -> list[Claim]:
    """Claim that JAX's printed numbers equal torch's."""
    pairs = [(runs["jax"][name], runs["torch"][name]) for name in shown]
    first = max(furthest(of_first_step(ours), of_first_step(theirs)) for ours, theirs in pairs)
    later = max(furthest(of_epochs(ours), of_epochs(theirs)) for ours, theirs in pairs)
    return [
        Claim("JAX's numbers of the first step above equal torch's, in float32", first < FIRST_STEP, first),
        Claim("JAX's numbers of the epochs above equal torch's, in float32", later < LATER, later),
    ]


def local_devices(options: Options) -> list[jax.Device]:
    """Return as many GPUs as the options need, or else CPU devices."""
    try:
        return prepare(options.devices, options.platform)
    except InputError:
        if options.platform is not None:
            raise
        return prepare(options.devices, "cpu")
