"""When requests are sent."""

from __future__ import annotations

import numpy as np

from jackfield.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each of ``count`` requests is due, in seconds after the start; the first one is due at once.

    Gaps are drawn from a gamma distribution of mean ``1 / rate`` and shape ``burstiness``: 1 is a Poisson process,
    less is burstier (the variance of a gap is ``1 / (rate² · burstiness)``), more is steadier. An infinite rate sends
    all at once.

    Raises:
        ConfigError: the rate or the burstiness is not positive.
    """
    for flag, value in (("--request-rate", rate), ("--burstiness", burstiness)):
        if not value > 0:
            raise ConfigError("must be more than 0", field=flag, value=value, remedy=f"raise {flag}")
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
