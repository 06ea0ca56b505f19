"""Runs in float64 that test the claims, and the verdicts."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from examples.claims import Claim
from examples.same_updates.settings import DDP, MANY, ONE, Case, Record, Settings, distance

Records = Mapping[str, Record]

# Relative to the weights' largest change; float64.
EQUAL = 1e-9  # measured: 8e-14 on 2 devices; 2.1e-10 on 3, by RMSprop, which without eps magnifies small gradients
NEARLY = 1e-2  # measured: 2.8e-5
DIFFERENT = 0.1  # measured: at least 0.7
EPS = 1e-8  # torch's default for Adam

# Runs for each optimizer and loss: DDP at one device's learning rate ("same"), or at N times that rate ("times").
PLAN = {
    ("sgd", "sum"): ("many", "times", "same"),
    ("adam", "sum"): ("many", "same", "times"),
    ("adagrad", "sum"): ("same",),
    ("rmsprop", "sum"): ("same",),
    ("sgd", "mean"): ("same", "times"),
    ("adam", "mean"): ("same",),
}


def right_rate(opt: str, reduction: str) -> str:
    """Return the rate that DDP needs: "times" if it averages sums and the optimizer depends on the gradient's size."""
    return "times" if (opt, reduction) == ("sgd", "sum") else "same"


def cases(devices: int) -> dict[str, Case]:
    """Return the runs by name."""
    runs: dict[str, Case] = {}
    for (opt, reduction), names in PLAN.items():
        ways = _ways(_even(devices, opt=opt), reduction, devices)
        runs |= {f"{opt} {reduction} {name}": ways[name] for name in ("one", *names)}
    ways = _ways(_even(devices, opt="adam", eps=EPS), "sum", devices)
    runs |= {f"adam eps {name}": ways[name] for name in ("one", "same")}
    odd = Settings(num_examples=4 * devices + 1, opt="sgd", lr=0.1, epochs=6, no_shuffle=True)
    return runs | {"odd": Case(odd, DDP, devices, "float64")}


def _even(devices: int, opt: str, eps: float = 0.0) -> Settings:
    """Return settings with 10 steps per epoch, and equally many examples for each process."""
    # A sum over more examples takes a larger step; if too large, training magnifies rounding.
    lr = 2 / devices if opt == "sgd" else 1.0
    return Settings(num_examples=50 * devices, opt=opt, lr=lr, eps=eps, no_shuffle=True)


def _ways(settings: Settings, reduction: str, devices: int) -> dict[str, Case]:
    whole = replace(settings, batch_size=settings.batch_size * devices)
    return {
        "one": Case(whole, ONE, 1, "float64", reduction),
        "many": Case(whole, MANY, devices, "float64", reduction),
        "same": Case(settings, DDP, devices, "float64", reduction),
        "times": Case(replace(settings, lr=settings.lr * devices), DDP, devices, "float64", reduction),
    }


def claims(runs: Mapping[str, Records], devices: int) -> list[Claim]:
    """Return the claims about learning rates and accuracy.

    Args:
        runs: each framework's records of `cases(devices)`.
        devices: number of devices.
    """
    labels = {
        "many": f"{devices} devices",
        "same": "DDP at the same rate",
        "times": f"DDP at {devices} times the rate",
    }
    results = []
    for (opt, reduction), names in PLAN.items():
        start = f"{opt}, {reduction}: one device"
        for name in names:
            run, one = f"{opt} {reduction} {name}", f"{opt} {reduction} one"
            if name in ("many", right_rate(opt, reduction)):
                says = f"{start} equals {labels[name]}"
                results.append(_apart(says, runs, run, one, lambda apart: apart < EQUAL))
            else:
                says = f"{start} differs from {labels[name]}"
                results.append(_apart(says, runs, run, one, lambda apart: apart > DIFFERENT))
    nearly = f"adam with eps {EPS:g}, sum: one device nearly equals DDP at the same rate"
    results.append(_apart(nearly, runs, "adam eps same", "adam eps one", lambda apart: apart < NEARLY))
    return results + _right_answers(runs)


def across(runs: Mapping[str, Records], devices: int) -> Claim:
    """Claim that JAX's weights equal torch's after each step of all runs."""
    names = cases(devices)
    furthest = max(distance(runs["jax"][name], runs["torch"][name]) for name in names)
    return Claim(f"{len(names)} runs: JAX's weights equal torch's after each step", furthest < EQUAL, furthest)


def _right_answers(runs: Mapping[str, Records]) -> list[Claim]:
    """Claim that accuracy exceeds 100 % if repeated examples count, and the sum is divided by the examples."""
    return [
        _measured(
            "accuracy in % with repeated examples counted: above 100",
            runs,
            lambda records: records["odd"].epochs[-1].accuracy,
            lambda accuracy: accuracy > 100,
        ),
        _measured(
            "accuracy in % with each example counted once: at most 100",
            runs,
            lambda records: records["odd"].epochs[-1].accuracy_once,
            lambda accuracy: accuracy <= 100,
        ),
    ]


def _apart(says: str, runs: Mapping[str, Records], run: str, one: str, holds: Callable[[float], bool]) -> Claim:
    return _measured(says, runs, lambda records: distance(records[run], records[one]), holds)


def _measured(
    says: str, runs: Mapping[str, Records], number: Callable[[Records], float], holds: Callable[[float], bool]
) -> Claim:
    numbers = {framework: number(records) for framework, records in runs.items()}
    return Claim(says, all(map(holds, numbers.values())), **numbers)
