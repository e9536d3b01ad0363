"""Split-conformal calibration of quantiles by the errors of the validation block: conformalised quantile regression
(Romano, Patterson and Candes 2019, arXiv 1905.03222), for every quantile and step by itself. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def conformal_shift(quantiles: Floats, actual: Floats, levels: Sequence[float]) -> Floats:
    """What to add to every quantile [H, Q], from forecasts [n, H, Q] and actual values [n, H] that training never saw.

    The errors' k-th smallest, k = ceil((n + 1) q); floor for q below one half, its mirror image, so that too few windows
    widen the band on both sides.
    """
    errors = np.sort(actual[..., None] - quantiles, axis=0)
    n = len(errors)
    # (n + 1) q may be a whole number plus rounding, such as 100 x 0.55: ceil would take one more
    wanted = [round((n + 1) * q, 9) for q in levels]
    places = [int(np.ceil(k) if q >= 0.5 else np.floor(k)) for k, q in zip(wanted, levels, strict=True)]
    return np.stack([errors[min(max(k, 1), n) - 1, :, i] for i, k in enumerate(places)], axis=1)


def shifted(quantiles: Floats, shift: Floats) -> Floats:
    """Quantiles [..., H, Q] moved by the shift [H, Q]; one that would fall below a lower one takes its value."""
    return np.maximum.accumulate(quantiles + shift, axis=-1)
