"""What the settings not tried yet probably take: the forecast, corrected by those that were tried.

The logarithm of measured over forecast time is taken to be a sum of what each knob's level does that the forecast does
not know, of what pairs of levels do, and of a smooth function of the micro-batch: a Gaussian process, whose deviations
say how wrong a forecast may be in each respect. So one trial speaks for all its neighbours, and what is near in the
forecast is told apart by a few trials. Rasmussen and Williams 2006, equations 2.25 and 2.26; the next trial is that of
the highest expected improvement (Jones, Schonlau and Welch 1998) for the time it costs.
"""

from collections.abc import Sequence
from math import erf

import numpy as np

from foretrain.config.options import OPTIONS, named
from foretrain.tuning.space import TUNABLE, Setting

Array = np.ndarray

# Standard deviations, in logarithms, of what a forecast by the catalogue misses; by a calibration it is half.
SPREAD = {name: option.tuned.spread for name, option in OPTIONS.items() if option.tuned and option.tuned.spread}
PAIRED, PAIRS = named(lambda option: option.tuned and option.tuned.paired), 0.08
TREND = 0.04  # a doubling of the micro-batch
BATCH, BATCH_LENGTH = 0.12, 2.0  # the length is in doublings
BATCH_WITH, BATCH_WITH_LENGTH = 0.06, 1.5  # how the micro-batch acts with one combination of the other knobs
ALL, ALONE = 1.0, 0.02  # all of them together, and each one for itself


class Model:
    """Expected logarithms of step times for all settings, given those that were measured."""

    def __init__(self, settings: Sequence[Setting], log_forecasts: Sequence[float], *, calibrated: bool) -> None:
        self.prior = np.asarray(log_forecasts, dtype=float)
        self.scale = 0.5 if calibrated else 1.0
        columns = list(zip(*(setting.levels for setting in settings), strict=True))
        self.codes = {knob: _coded(column) for knob, column in zip(TUNABLE, columns, strict=True)}
        self.batch = np.log2(np.asarray(columns[0], dtype=float))
        self.batch -= self.batch.mean()
        self.others = _coded([setting.levels[1:] for setting in settings])
        self.tried: list[int] = []
        self.values: list[float] = []
        self.noises: list[float] = []

    def observe(self, number: int, log_s: float, noise: float) -> None:
        """A measurement; `noise` is its standard deviation. A later one of the same setting replaces it."""
        if number in self.tried:
            at = self.tried.index(number)
            self.values[at], self.noises[at] = log_s, noise
        else:
            self.tried.append(number)
            self.values.append(log_s)
            self.noises.append(noise)

    def _covariance(self, left: Array, right: Array) -> Array:
        def same(codes: Array) -> Array:
            return (codes[left][:, None] == codes[right][None, :]).astype(float)

        found = sum((SPREAD[knob] ** 2 * same(self.codes[knob]) for knob in SPREAD), np.zeros((len(left), len(right))))
        for i, one in enumerate(PAIRED):
            for other in PAIRED[i + 1 :]:
                found += PAIRS**2 * same(self.codes[one]) * same(self.codes[other])
        apart = (self.batch[left][:, None] - self.batch[right][None, :]) ** 2
        found += BATCH**2 * np.exp(-apart / (2 * BATCH_LENGTH**2))
        found += BATCH_WITH**2 * np.exp(-apart / (2 * BATCH_WITH_LENGTH**2)) * same(self.others)
        found += TREND**2 * self.batch[left][:, None] * self.batch[right][None, :]
        found += ALONE**2 * (left[:, None] == right[None, :])
        return self.scale**2 * found + ALL**2

    def posterior(self) -> tuple[Array, Array]:
        """(expected logarithms of seconds, their standard deviations) of all settings."""
        every = np.arange(len(self.prior))
        alone = sum(s**2 for s in (*SPREAD.values(), BATCH, BATCH_WITH, ALONE))
        alone += PAIRS**2 * len(PAIRED) * (len(PAIRED) - 1) / 2
        own = self.scale**2 * (alone + TREND**2 * self.batch**2) + ALL**2
        if not self.tried:
            return self.prior.copy(), np.sqrt(own)
        tried = np.asarray(self.tried)
        matrix = self._covariance(tried, tried) + np.diag(np.square(self.noises))
        cross = self._covariance(every, tried)
        residual = np.asarray(self.values) - self.prior[tried]
        weights = np.linalg.solve(matrix, np.column_stack([residual, cross.T]))
        mean = self.prior + cross @ weights[:, 0]
        variance = own - np.einsum("ij,ji->i", cross, weights[:, 1:])
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def improvement(self) -> Array:
        """Expected improvement on the best setting that was tried, in logarithms; 0 for those that were tried."""
        mean, deviation = self.posterior()
        best = min(mean[number] for number in self.tried)
        z = (best - mean) / deviation
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        found = (best - mean) * _normal(z) + deviation * density
        found[self.tried] = 0.0
        return np.asarray(np.maximum(found, 0.0))


def _coded(column: Sequence[object]) -> Array:
    numbers: dict[object, int] = {}
    return np.asarray([numbers.setdefault(value, len(numbers)) for value in column])


def _normal(z: Array) -> Array:
    """The share of a normal distribution below z."""
    return np.asarray([0.5 * (1 + erf(x / 2**0.5)) for x in z])
