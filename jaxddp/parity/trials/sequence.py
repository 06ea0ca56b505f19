"""Variants of a run's steps that a check tries, in their order."""

from jaxddp.parity.coverage import Trial
from jaxddp.parity.port.variants import Variant


def of_model(steps: int) -> list[Variant]:
    """Return variants of weights and batch; with weights of 0 only what is not finite counts, as many values are equal.

    Args:
        steps: number of steps of the run.

    >>> [variant.trial.what for variant in of_model(10)][::4]
    ['with weights 4 times as large', 'with the examples of step 11']
    """
    return [
        Variant(Trial("weights", "with weights 4 times as large"), weights=4.0),
        Variant(Trial("weights", "with weights 4 times as small"), weights=0.25),
        Variant(Trial("batch", "with a batch 4 times as large"), batch=4.0),
        Variant(Trial("batch", "with a batch of the other sign"), batch=-1.0),
        Variant(Trial("batch", f"with the examples of step {steps + 1}"), step=steps),
        # The last one, as the optimizer of a `jax_step` keeps its own state, and ties may break either way here.
        Variant(Trial("weights", "with weights of 0"), weights=0.0),
    ]


def of_optimizer(has_moments: bool, by_loss: bool = False) -> list[Variant]:
    """Return variants of the gradients that the optimizer gets, one after the other, as its state remembers.

    Args:
        has_moments: both sides show the optimizer's first moments.
        by_loss: gradients can be changed only by a factor of the loss.

    >>> [variant.trial.what for variant in of_optimizer(True, by_loss=True) if variant.trial][-1]
    'with first moments 10,000 times as large'
    """
    moments = Trial("optimizer_state", "with first moments 10,000 times as large")
    variants = [
        Variant(),
        Variant(Trial("gradients", "with gradients 1000 times as large"), gradients=1e3),
        Variant(),
        Variant(Trial("gradients", "with gradients 1000 times as small"), gradients=1e-3),
        Variant(Trial("gradients", "with gradients of 0"), gradients=0.0),
        Variant(Trial("gradients", "with gradients of the other sign"), gradients=-1.0),
        Variant(Trial("gradients", "with one huge element among the gradients"), spike=1e6),
        *([Variant(moments, moments=1e4)] if has_moments else []),
        Variant(Trial("gradients", "with one NaN among the gradients"), spike=float("nan")),
    ]
    return [variant for variant in variants if not by_loss or variant.spike is None]
