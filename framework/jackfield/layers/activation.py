"""Activations: over a fused gate and up projection, or over one projection alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from jackfield.errors import ConfigError, did_you_mean
from jackfield.interfaces import PendingNorm
from jackfield.layers.norm import Fed

GATED = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_fast": "gelu_tanh_and_mul",
    "gelu_accurate": "gelu_tanh_and_mul",
    "gelu_python_tanh": "gelu_tanh_and_mul",
    "gelu_python": "gelu_and_mul",
}
"""HF's activation names and the op that each is."""


class Projection(Protocol):
    """A layer whose results an activation takes."""

    def folds(self, op: str, rows: int) -> bool:
        """Return whether it computes an op after it along with its product of that many rows."""
        ...

    def gated(self, x_TI: torch.Tensor | PendingNorm, op: str) -> torch.Tensor:
        """Return the op of the product."""
        ...

    def __call__(self, x_TI: Any) -> torch.Tensor:
        """Return the product."""
        ...


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _laplace(x: torch.Tensor) -> torch.Tensor:
    """Return the Laplace activation of MEGA (arXiv:2209.10655)."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5)))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


PLAIN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("silu", "swish"), F.silu),
    **dict.fromkeys(("gelu", "gelu_python"), F.gelu),
    **{name: _gelu_tanh for name, op in GATED.items() if op == "gelu_tanh_and_mul"},
    "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "laplace": _laplace,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "linear": _same,
}
"""HF's activations that have no parameters."""


class GatedActivation:
    """``[T, 2F] -> [T, F]``: an activation of the first half of each row times the second half. Its results are
    quantized where the layer that it feeds likes that.

    Args:
        name: HF's name. ops: chosen implementations. named: ops whose implementation the user named, which are never
            folded into another kernel.

    Raises:
        ConfigError: the name is unknown.
    """

    def __init__(self, name: str, ops: Mapping[str, Callable[..., Any]], named: frozenset[str] = frozenset()) -> None:
        self._folded = ""
        if name in PLAIN and name not in GATED:
            self._plain, self._quant = _times_up(PLAIN[name]), None
        else:
            op = gated_op(name)
            self._plain, self._quant = ops[op], ops.get(f"{op}_quant")
            self._folded = op if op not in named else ""
        self._fed: Fed | None = None

    def feed(self, layer: Fed) -> None:
        """Say that ``layer`` alone takes what this activation returns."""
        self._fed = layer if self._quant is not None else None

    def __call__(self, x_T2F: torch.Tensor) -> Any:
        """Return [T, F]."""
        if self._quant is not None and self._narrow(len(x_T2F)):
            return self._quant(x_T2F)
        return self._plain(x_T2F)

    def _narrow(self, rows: int) -> bool:
        """Return whether that many results are quantized."""
        return self._fed is not None and self._quant is not None and self._fed.takes_narrow(rows)

    def of(self, projection: Projection, x_TI: Any) -> Any:
        """Return the activation [T, F] of what a projection gives, in one kernel where the projection can."""
        rows = len(x_TI)
        if self._folded and projection.folds(self._folded, rows) and not self._narrow(rows):
            return projection.gated(x_TI, self._folded)
        return self(projection(x_TI))


class PlainActivation:
    """``[T, F] -> [T, F]``: an activation of each number.

    Args:
        name: HF's name.

    Raises:
        ConfigError: the name is unknown.
    """

    def __init__(self, name: str) -> None:
        if name not in PLAIN:
            raise _unknown(name, PLAIN)
        self._function = PLAIN[name]

    def feed(self, layer: Fed) -> None:
        """There is no quantizing form."""

    def __call__(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Return [T, F]."""
        return self._function(x_TF)

    def of(self, projection: Projection, x_TI: Any) -> torch.Tensor:
        """Return the activation [T, F] of what a projection gives."""
        return self._function(projection(x_TI))


def gated_op(name: str) -> str:
    """Return the op of an HF activation name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in GATED:
        raise _unknown(name, GATED)
    return GATED[name]


def _times_up(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gated(x_T2F: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
        return function(gate_TF) * up_TF

    return gated


def _unknown(name: str, known: Mapping[str, object]) -> ConfigError:
    return ConfigError(
        f"the activation '{name}' is not known",
        field="hidden_act",
        value=name,
        remedy=did_you_mean(name, known) or f"known: {', '.join(sorted(known))}",
    )
