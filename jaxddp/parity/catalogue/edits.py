"""Generic faults: edits of torch's programs, and lines that round. The words of a cause say which edit or line."""

from jaxddp.parity.catalogue.fault import Fault

EDITS: dict[str, Fault] = {
    "number": Fault("a number is another one", "give the call the reference's number"),
    "other_axis": Fault("a call works along another axis", "give the call the reference's axis"),
    "other_option": Fault("an option of a call differs", "give the call the reference's option"),
    "other_function": Fault("a call is made of another function", "call the function that the reference calls"),
    "other_index": Fault("other elements are taken", "take the elements that the reference takes"),
    "call_left_out": Fault("a call of the reference is left out", "make the call, like the reference"),
    "calls_left_out": Fault("calls of the reference are left out", "make the calls, like the reference"),
    "call_added": Fault("the port makes a call that the reference does not make", "leave the call out"),
    "call_moved": Fault("a call is made at another place", "make the call where the reference makes it"),
    "operand_left_out": Fault("an operand is left out", "use all operands, like the reference"),
    "other_operand": Fault("a call is given another tensor", "give the call the tensor that the reference gives it"),
    "other_values": Fault(
        "an entry of the batch has other values", "make the entry as the reference does, from the same data"
    ),
    "other_expression": Fault(
        "a result is computed in another way", "compute it like the reference, from the same tensors"
    ),
    "few_bits": Fault(
        "values are computed in a type of fewer bits",
        "compute them in the reference's type: no dtype of a layer, and no cast, to bfloat16 or float16",
    ),
    "other_order": Fault("parts are taken in another order", "take the parts in the reference's order"),
    "gradient_stopped": Fault(
        "the gradient is stopped where the reference lets it pass",
        "let the gradient pass: no jax.lax.stop_gradient, and the array itself in place of a copy made outside of the "
        "differentiated function",
    ),
    "gradient_not_stopped": Fault(
        "the gradient passes where the reference stops it",
        "stop the gradient as torch's detach() or no_grad() does: jax.lax.stop_gradient(x)",
    ),
    "other_gradient": Fault(
        "a value's gradient is computed in another way",
        "give a jax.custom_vjp the reference's backward pass, and stop gradients where the reference does",
    ),
    "micro_batches_lost": Fault(
        "the gradients of some micro-batches are lost",
        "add the gradients of all micro-batches up before the mean: total = jax.tree.map(jnp.add, total, gradients)",
    ),
    "addend": Fault("the port adds a number", "add what the reference adds"),
    "factor": Fault("a result or its gradient has another factor", "give it the factor that the reference has"),
    "penalty_in_loss": Fault(
        "the loss of one side has an L2 penalty of the weights",
        "give both sides the penalty, or neither: a weight decay c as torch's Adam and SGD have it, and "
        "optax.add_decayed_weights(c) in front of the optimizer, is c / 2 times the sum of the squares in the loss",
    ),
    "schedule": Fault(
        "the learning rate follows another schedule",
        "return torch's rate for update t, counted from 0 over the whole run: optax.cosine_decay_schedule(lr, T_max, "
        "alpha=eta_min / lr) for CosineAnnealingLR, jaxddp.schedules.step(lr, step_size, gamma) for StepLR, with t in "
        "steps if torch calls scheduler.step() after each step",
    ),
    "sum_moved_once": Fault(
        "torch trains several vectors where jax has their sum, which then moves by several updates",
        "train only one of torch's, with the others set to 0 and frozen (requires_grad_(False)), or give jax's layer "
        "as many arrays",
    ),
    "rate_rounded": Fault(
        "the learning rate is computed in float32 on one side, or a part of it",
        "compute the rate from Python's numbers, in float64, like torch's schedulers; torch's ASGD and "
        "NAdam keep a number in float32, like jaxddp.optim's; or accept the difference: it is the rounding of a rate",
    ),
    "rounded_to_16_bits": Fault(
        "values are rounded to 16 bits where the reference keeps 32",
        "leave out the cast: no .astype(jnp.bfloat16), and dtype=jnp.float32 in the layer",
    ),
    "digits_lost": Fault(
        "a formula loses more digits in float32 than the reference's, as E[x^2] - E[x]^2 does, or log(sum(exp(x)))",
        "use the formula of the reference: x.var(), jax.nn.logsumexp(x), jnp.log1p(x), jnp.expm1(x); compute large "
        "tables in NumPy's float64",
    ),
}
