"""Linear layers, embeddings and heads: one class each, whatever the parallelism or quantization.

Legend: T tokens, I inputs, O outputs of this rank, V vocabulary, E width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from jackfield.interfaces import (
    ActivationSpec,
    Communicator,
    LayerInfo,
    LinearScheme,
    Parallel,
    ParameterHolder,
    ParameterSpec,
    PendingNorm,
    QuantizedActivation,
)
from jackfield.layers.parameters import SchemeWeight

NARROW = ActivationSpec("float8_e4m3fn", "token")
"""What the quantizing ops make."""


class Linear(SchemeWeight):
    """``x @ W.T + b`` over one or several stacked checkpoint matrices."""

    bias: nn.Parameter | None

    def __init__(self, info: LayerInfo, scheme: LinearScheme, communicator: Communicator, device: torch.device) -> None:
        super().__init__(info, scheme, device)
        self._communicator = communicator
        self._reduce = info.parallel is Parallel.ROW and communicator.size > 1
        self.bias = None
        if info.bias:
            size = sum(info.local_output_sizes)
            self.bias = nn.Parameter(
                torch.zeros(size, dtype=getattr(torch, info.dtype), device=device), requires_grad=False
            )
            self._expect("bias", [s.name for s in info.shards])

    def load(self, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take a weight tensor or a bias."""
        if suffix == "bias" and self.bias is not None:
            self._load_bias(self.bias, shard, tensor)
            return True
        return super().load(shard, suffix, tensor)

    def _load_bias(self, bias: torch.Tensor, shard: str, tensor: torch.Tensor) -> None:
        start = 0
        for part, size in zip(self.info.shards, self.info.local_output_sizes, strict=True):
            if part.name == shard:
                if self.info.parallel is Parallel.COLUMN:
                    tensor = self._part(tensor, 0, part.size, *part.slice(self.info.rank), "bias")
                self._copy(bias[start : start + size], tensor, "bias")
                self._filled("bias", shard)
            start += size

    def takes_narrow(self, rows: int) -> bool:
        """Return whether that many rows are best given in float8_e4m3fn with a scale each."""
        return self.scheme.activation_spec(self.info, rows) == NARROW

    def folds(self, op: str, rows: int) -> bool:
        """Return whether the layer computes an op right before or after it along with its product of that many rows."""
        return not self._reduce and op in self.scheme.folded_ops(self.info, rows)

    def gated(self, x_TI: torch.Tensor | PendingNorm, op: str) -> torch.Tensor:
        """Return the op of the product, [T, O / 2]; only where the layer ``folds`` it."""
        return self.scheme.apply_folded(self, x_TI, self.bias, op)

    def forward(self, x_TI: torch.Tensor | QuantizedActivation | PendingNorm) -> torch.Tensor:
        """Return [T, O]; for ROW layers the sum over ranks, the bias added once."""
        if isinstance(x_TI, PendingNorm):
            return self.scheme.apply_folded(self, x_TI, self.bias)
        if not self._reduce:
            return self.scheme.apply(self, x_TI, self.bias)
        partial = self._communicator.all_reduce(self.scheme.apply(self, x_TI, None))
        return partial if self.bias is None else partial + self.bias


class Embedding(SchemeWeight):
    """A vocabulary embedding, rows cut across ranks."""

    def __init__(self, info: LayerInfo, scheme: LinearScheme, communicator: Communicator, device: torch.device) -> None:
        super().__init__(info, scheme, device)
        self._communicator = communicator
        self._cut_rows = info.parallel is Parallel.COLUMN and communicator.size > 1
        self._first = info.shards[0].slice(info.rank)[0] if self._cut_rows else 0

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return [T, E]."""
        if not self._cut_rows:
            return self.scheme.lookup(self, ids_T)
        local = ids_T - self._first
        outside = (local < 0) | (local >= self.info.local_output_sizes[0])
        rows = self.scheme.lookup(self, local.masked_fill(outside, 0))
        return self._communicator.all_reduce(rows.masked_fill_(outside.unsqueeze(-1), 0))


class Head(Linear):
    """The output projection; its logits are gathered over ranks. ``tied`` shares the weight of an embedding."""

    def __init__(
        self,
        info: LayerInfo,
        scheme: LinearScheme,
        communicator: Communicator,
        device: torch.device,
        tied: Embedding | None = None,
    ) -> None:
        super().__init__(info, scheme if tied is None else _Nothing(), communicator, device)
        self._tied = [tied] if tied is not None else []  # a list, so that torch does not register it twice

    def folds(self, op: str, rows: int) -> bool:
        """Nothing feeds a head alone."""
        return False

    def forward(self, x_TI: torch.Tensor | QuantizedActivation | PendingNorm) -> torch.Tensor:
        """Return logits [T, V]."""
        assert not isinstance(x_TI, PendingNorm), "a head folds nothing"
        if self._tied:
            owner = self._tied[0]
            local = owner.scheme.apply(owner, x_TI, self.bias)
        else:
            local = self.scheme.apply(self, x_TI, self.bias)
        return self._communicator.all_gather(local, dim=-1) if self.info.parallel is Parallel.COLUMN else local


class ThenPlain(LinearScheme):
    """Loads as one scheme says, and is run by another one that takes dense weights."""

    def __init__(self, stored: LinearScheme, plain: LinearScheme) -> None:
        self._stored, self._plain = stored, plain

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return what is stored."""
        return self._stored.parameters(info)

    def finalize(self, layer: ParameterHolder) -> None:
        """Make the weight dense, and let the other scheme prepare it."""
        self._stored.finalize(layer)
        self._plain.finalize(layer)

    def activation_spec(self, info: LayerInfo, rows: int) -> ActivationSpec | None:
        """See LinearScheme."""
        return self._plain.activation_spec(info, rows)

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        """See LinearScheme."""
        return self._plain.folded_ops(info, rows)

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LinearScheme."""
        return self._plain.apply(layer, x_TI, bias_O, out_TO)

    def apply_folded(
        self, layer: ParameterHolder, x_TI: torch.Tensor | PendingNorm, bias_O: torch.Tensor | None, gate: str = ""
    ) -> torch.Tensor:
        """See LinearScheme."""
        return self._plain.apply_folded(layer, x_TI, bias_O, gate)

    def lookup(self, layer: ParameterHolder, ids_T: torch.Tensor) -> torch.Tensor:
        """See LinearScheme."""
        return self._plain.lookup(layer, ids_T)

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """See LinearScheme."""
        return self._plain.dequantize(layer)


class _Nothing(LinearScheme):
    """The scheme of a head that owns no weight."""

    def parameters(self, info: LayerInfo) -> tuple[()]:
        return ()
