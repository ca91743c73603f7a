"""Frequencies of rotary embeddings, for every way to stretch them. Legend: R rotary size.

Facts of each kind are those of ``transformers.modeling_rope_utils`` and of the papers named at the functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jackfield.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a kind of scaling may look at.

    Args:
        size: R. theta: base. values: HF's ``rope_scaling`` (or ``rope_parameters``) object. max_position: longest
            sequence the model was made for, or 0 when that is not known. length: longest sequence that will be run,
            or 0.
    """

    size: int
    theta: float
    values: Mapping[str, Any]
    max_position: int = 0
    length: int = 0

    def frequencies(self, theta: float | None = None) -> torch.Tensor:
        """Return the frequencies [R/2] of a base, not stretched."""
        return self.waves(theta).reciprocal()

    def waves(self, theta: float | None = None) -> torch.Tensor:
        """Return [R/2] powers of a base, from 0 on and below 1: wavelengths as multiples of a turn of 1 radian."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.int64).float() / self.size
        return torch.pow(torch.tensor(theta or self.theta), exponents)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the scaling object.

        Raises:
            ConfigError: it is absent, and there is no default.
        """
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(
                f"the rotary scaling '{kind_of(self.values)}' lacks '{key}'",
                field=f"rope_scaling.{key}",
                value=None,
                remedy="add it to the model's configuration",
            )
        return float(value)

    @property
    def original(self) -> float:
        """Longest sequence before stretching."""
        return self.number("original_max_position_embeddings", self.max_position or None)


Rule = Callable[[Stretch], torch.Tensor]


def scaled_frequencies(
    rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_position: int = 0, length: int = 0
) -> torch.Tensor:
    """Return the inverse wavelengths [R/2] after scaling.

    Args:
        rotary_dim: R. theta: base. scaling: HF's ``rope_scaling`` (or ``rope_parameters``) object, or None.
            max_position: longest sequence the model was made for. length: longest sequence that will be run: kinds
            whose frequencies depend on the length of a sequence are computed for that one, since a cache cannot be
            rotated anew.

    Raises:
        ConfigError: the scaling type is unknown, or lacks a number.
    """
    stretch = Stretch(rotary_dim, theta, scaling or {}, max_position, length)
    kind = kind_of(stretch.values)
    if kind not in SCALINGS:
        raise ConfigError(
            f"rotary scaling '{kind}' is not known",
            field="rope_scaling.rope_type",
            value=kind,
            remedy=did_you_mean(kind, SCALINGS) or f"known: {', '.join(SCALINGS)}",
        )
    return SCALINGS[kind](stretch)


def attention_factor(scaling: Mapping[str, Any] | None, max_position: int = 0) -> float:
    """Return the factor on cosines and sines that goes with a scaling; 1 for most."""
    stretch = Stretch(0, 1.0, scaling or {}, max_position)
    kind = kind_of(stretch.values)
    if kind not in ("yarn", "deepseek_yarn", "longrope", "su"):
        return 1.0
    if stretch.values.get("attention_factor") is not None:
        return stretch.number("attention_factor")
    return _longrope_factor(stretch) if kind in ("longrope", "su") else _yarn_factor(stretch)


def kind_of(scaling: Mapping[str, Any]) -> str:
    """Return the kind of scaling that an object of a configuration names; older ones call it ``type``."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _default(stretch: Stretch) -> torch.Tensor:
    return stretch.frequencies()


def _linear(stretch: Stretch) -> torch.Tensor:
    """Position interpolation (arXiv:2306.15595): all positions are divided."""
    return stretch.frequencies() / stretch.number("factor")


def _ntk(stretch: Stretch) -> torch.Tensor:
    """A larger base once and for all; with ``mixed_b`` each frequency has a stretch of its own (Su, "NTK-RoPE")."""
    factor, half = stretch.number("factor"), stretch.size / 2
    if stretch.values.get("mixed_b") is None:
        return stretch.frequencies(stretch.theta * factor) / math.pow(factor, 1 / half)
    power = stretch.number("mixed_b")
    shares = torch.arange(1, half + 1, dtype=torch.float32) / half
    return stretch.frequencies() / (math.log(factor) * shares.pow(power)).exp()


def _dynamic(stretch: Stretch) -> torch.Tensor:
    """A base that grows with the length of the sequence, for the longest one; or by ``alpha`` at once."""
    power = stretch.size / (stretch.size - 2)
    if stretch.values.get("alpha") is not None:
        return stretch.frequencies(stretch.theta * stretch.number("alpha") ** power)
    factor, original = stretch.number("factor"), stretch.original
    ratio = max(1.0, stretch.length / original)
    return stretch.frequencies(stretch.theta * (factor * ratio - (factor - 1)) ** power)


def _yarn(stretch: Stretch) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): short waves stay, long ones are interpolated, with a ramp between."""
    fast, slow = stretch.number("beta_fast", 32), stretch.number("beta_slow", 1)
    low, high = (_turning_point(stretch, turns) for turns in (fast, slow))
    if stretch.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, stretch.size - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(stretch.size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = stretch.frequencies()
    return plain / _stretched_by(stretch) * ramp + plain * (1 - ramp)


def _turning_point(stretch: Stretch, turns: float) -> float:
    """Return which pair turns that often in the original length."""
    return stretch.size * math.log(stretch.original / (turns * 2 * math.pi)) / (2 * math.log(stretch.theta))


def _yarn_factor(stretch: Stretch) -> float:
    factor = _stretched_by(stretch)
    above, below = (stretch.values.get(key) for key in ("mscale", "mscale_all_dim"))
    if above and below:
        return _mscale(factor, float(above)) / _mscale(factor, float(below))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _stretched_by(stretch: Stretch) -> float:
    return stretch.number("factor", stretch.max_position / stretch.original)


def _longrope(stretch: Stretch) -> torch.Tensor:
    """LongRoPE (arXiv:2402.13753): searched factors, one list for lengths up to the original and one for more."""
    key = "long_factor" if stretch.length > stretch.original else "short_factor"
    factors = stretch.values.get(key)
    if not isinstance(factors, list | tuple) or len(factors) != stretch.size // 2:
        raise ConfigError(
            f"the rotary scaling needs {stretch.size // 2} numbers in '{key}'",
            field=f"rope_scaling.{key}",
            value=factors,
            remedy="correct the model's configuration",
        )
    return (torch.tensor(factors, dtype=torch.float32) * stretch.waves()).reciprocal()


def _longrope_factor(stretch: Stretch) -> float:
    factor = _stretched_by(stretch)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(stretch.original))


def _llama3(stretch: Stretch) -> torch.Tensor:
    """Llama 3.1's rule: long waves are stretched by ``factor``, short ones stay, those between are blended."""
    frequencies, factor, original = stretch.frequencies(), stretch.number("factor"), stretch.original
    low, high = stretch.number("low_freq_factor"), stretch.number("high_freq_factor")
    waves = 2 * math.pi / frequencies
    blend = (original / waves - low) / (high - low)
    smooth = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(waves > original / low, frequencies / factor, smooth)
    return torch.where(waves < original / high, frequencies, scaled)


def _proportional(stretch: Stretch) -> torch.Tensor:
    """Only the fastest pairs turn (Gemma 4): the others have frequency 0, and keep their places in the head."""
    turning = int(stretch.number("partial_rotary_factor", 1.0) * stretch.size // 2)
    frequencies = stretch.frequencies() / stretch.number("factor", 1.0)
    frequencies[turning:] = 0
    return frequencies


def _factors(stretch: Stretch) -> torch.Tensor:
    """Every frequency is divided by a number of its own, as GGUF stores them."""
    return stretch.frequencies() / torch.tensor(stretch.values["factors"], dtype=torch.float32)


SCALINGS: Mapping[str, Rule] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "factors": _factors,
}
"""Kinds of scaling by HF's name."""
