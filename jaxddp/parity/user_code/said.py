"""What the words of a cause and the code of its fix say: values of both sides, names, options."""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
VALUE = rf"{NUMBER}|'[^']*'|True|False|None|[\w.]+"
PAIRS = (
    re.compile(
        rf"(?P<what>.*?)(?P<port>(?<![\w.])(?:{NUMBER}))[^,;]*, the reference(?: has|'s(?: to)?) (?P<torch>{NUMBER})"
    ),
    re.compile(rf"(?P<what>.*?) ?(?P<port>{VALUE})(?: \(zeros\))? instead of (?P<torch>{VALUE})"),
)
FACTOR = re.compile(rf"times ({NUMBER})(?:, (?!the reference has).*|, the reference has 1)?$")
OPTION = re.compile(r"(\w+)'s (\w+) $|(\w+) (eps|momentum) $")
DENOMINATOR = 1000  # largest one of a fraction that is written as one
LONG = 9  # digits of a number that is a rounded fraction or root, and not a decimal fraction


@dataclass(frozen=True)
class Said:
    """A value of the port and the reference's.

    Attributes:
        port, torch: the values as code.
        call, option: the call and the option that has the value; "" if the words do not say.
        is_factor: the port multiplies something by its value, and the reference does not.
    """

    port: str
    torch: str
    call: str = ""
    option: str = ""
    is_factor: bool = False


def values_of(says: str) -> Iterator[Said]:
    """Yield the values of both sides that a cause says.

    >>> [*values_of("leaky_relu's negative_slope 0.01, the reference has 0.2")]
    [Said(port='0.01', torch='0.2', call='leaky_relu', option='negative_slope', is_factor=False)]
    >>> [one.torch for one in values_of("sigmoid instead of silu, and alpha 0.2 instead of 0.1")]
    ['silu', '0.1']
    """
    if found := FACTOR.search(says):
        yield Said(found[1], "1", is_factor=True)
        return
    for part in says.split(", and "):
        for pattern in PAIRS:
            if found := pattern.search(re.sub(r"argument \d+ ", "argument ", part)):
                named = OPTION.search(found["what"].rstrip() + " ")
                call, option = (named[1] or named[3], named[2] or named[4]) if named else ("", "")
                yield Said(found["port"], _exactly(found["torch"]), call, option)
                break


def _exactly(number: str) -> str:
    """Return code of a number that was rounded for the report: a fraction, or a root of one.

    >>> _exactly("0.3333333333"), _exactly("0.3535533906"), _exactly("0.2")
    ('1 / 3', '0.125 ** 0.5', '0.2')
    """
    if not re.fullmatch(NUMBER, number) or len(re.sub(r"e.*|[-.]", "", number.lstrip("-0."))) < LONG:
        return number
    value = float(number)
    for form, x in (("{}", value), ("{} ** 0.5", value * value)):
        near = Fraction(x).limit_denominator(DENOMINATOR)
        if math.isclose(near, x, rel_tol=1e-9):
            ratio = f"{near.numerator} / {near.denominator}"
            return form.format(ratio if form == "{}" else f"{float(near):g}" if _is_short(near) else f"({ratio})")
    return number


def _is_short(x: Fraction) -> bool:
    return float(f"{float(x):g}") == x


def code_of(fix: str) -> Iterator[ast.Call]:
    """Yield the calls that the text of a fix has as code, the outer ones first.

    >>> [ast.unparse(call) for call in code_of("use jax.nn.gelu(x, approximate=False) for torch's default")]
    ['jax.nn.gelu(x, approximate=False)']
    """
    for found in re.finditer(r"[A-Za-z_][\w.]*\(", fix):
        depth = 0
        for at in range(found.end() - 1, len(fix)):
            depth += (fix[at] in "([{") - (fix[at] in ")]}")
            if not depth:
                try:
                    parsed = ast.parse(fix[found.start() : at + 1], mode="eval").body
                except SyntaxError:
                    break
                if isinstance(parsed, ast.Call):
                    yield parsed
                break


def options_of(fix: str) -> Iterator[tuple[str, str]]:
    """Yield the options that a fix names outside of a call.

    >>> [*options_of("use momentum=0.9 in nnx.BatchNorm")]
    [('momentum', '0.9')]
    """
    yield from re.findall(r"(?<![\w.])([a-z]\w*)=((?:\(\(.*?\)\))|[\w.\-]+)", fix)
