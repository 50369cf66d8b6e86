"""Binary number formats of training, and rounding to them: to nearest, ties to even, with subnormals, as hardware and torch do.

A format with e exponent bits, m mantissa bits and bias b = 2^(e-1) - 1 holds (IEEE 754-2019, section 3):

    largest        (2 - 2^-m) 2^b
    least normal   2^(1-b)
    least          2^(1-b-m)
    epsilon        2^-m, the gap behind 1

e4m3 is the finite one of the 8-bit formats (OCP 8-bit Floating Point Specification, 2023): it has no infinity and uses all but one code of
its topmost exponent, so its largest number is 1.75 * 2^8 = 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NumberFormat:
    """``bytes`` in memory (tf32 is stored in 4, and rounded when multiplied). ``finite``: no infinity; too large becomes NaN."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bytes: int
    finite: bool = False

    @property
    def bias(self) -> int:
        """What is added to the exponent where it is stored."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        if self.finite:
            return float((2 - 2.0 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1))
        return float((2 - 2.0**-self.mantissa_bits) * 2.0**self.bias)

    @property
    def least_normal(self) -> float:
        """The least positive number of full precision."""
        return float(2.0 ** (1 - self.bias))

    @property
    def least(self) -> float:
        """The least positive number, a subnormal one."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @property
    def epsilon(self) -> float:
        """From 1 to the next larger number."""
        return float(2.0**-self.mantissa_bits)

    def round(self, values: npt.ArrayLike) -> Floats:
        """Each value as the nearest number of this format; what is too large becomes infinite (NaN in a format without infinity)."""
        exact = np.asarray(values, np.float64)
        _, exponent = np.frexp(np.where(np.isfinite(exact), exact, 0.0))
        step = np.ldexp(1.0, np.maximum(exponent - 1, 1 - self.bias) - self.mantissa_bits)
        near: Floats = np.rint(exact / step) * step
        too_large = np.abs(near) > self.largest
        return np.where(too_large, np.nan if self.finite else np.copysign(np.inf, exact), near)

    def every_number(self) -> Floats:
        """All finite numbers from 0 on in order, decoded from their bits one by one; ValueError for more than 16 bits."""
        bits = self.exponent_bits + self.mantissa_bits
        if bits > 15:
            raise ValueError(f"{self.name} has 2^{bits} numbers")
        codes = np.arange(2**bits)
        exponent, mantissa = codes >> self.mantissa_bits, codes & (2**self.mantissa_bits - 1)
        value = np.where(
            exponent == 0,
            np.ldexp(mantissa.astype(np.float64), 1 - self.bias - self.mantissa_bits),
            np.ldexp(1 + mantissa / 2.0**self.mantissa_bits, exponent - self.bias),
        )
        top = exponent == 2**self.exponent_bits - 1
        special = (codes == 2**bits - 1) if self.finite else top
        return np.asarray(value[~special], np.float64)


FORMATS = (
    NumberFormat("fp32", 8, 23, 4),
    NumberFormat("tf32", 8, 10, 4),
    NumberFormat("fp16", 5, 10, 2),
    NumberFormat("bf16", 8, 7, 2),
    NumberFormat("fp8 e4m3", 4, 3, 1, finite=True),
    NumberFormat("fp8 e5m2", 5, 2, 1),
)
BY_NAME = {chosen.name: chosen for chosen in FORMATS}


def nearest_by_search(values: Floats, numbers: Floats) -> Floats:
    """Each magnitude of ``values`` (none above the largest) as its nearest of ``numbers``, ties to the even code; found by looking."""
    size = np.abs(values)
    above = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.asarray(np.copysign(np.where(up, high, low), values), np.float64)
