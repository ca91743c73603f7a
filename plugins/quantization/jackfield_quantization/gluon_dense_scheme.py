"""The dense weight of a layer, whose gated products of many rows are one kernel.

Legend: T rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from jackfield.interfaces import LayerInfo, ParameterHolder, PendingNorm
from jackfield_quantization.triton_dense_plan import GATES
from jackfield_quantization.triton_dense_scheme import NAMES, SkinnyScheme
from jackfield_quantization.unquantized_scheme import WEIGHT
from jackfield_triton.rows_product import ACTIVATIONS, ALIGNMENT, has_wide_groups, rows_product, tiles

LEAST_TILES = 4
"""Tiles of each multiprocessor from which on the last ones, which leave some of them idle, matter little."""


class GatedScheme(SkinnyScheme):
    """:class:`SkinnyScheme`, and gates beside what they are multiplied with for many rows."""

    _wide = False

    def finalize(self, layer: ParameterHolder) -> None:
        """See SkinnyScheme."""
        super().finalize(layer)
        device = layer.get_parameter(WEIGHT).device
        self._wide = device.type == "cuda" and has_wide_groups(torch.cuda.get_device_capability(device))

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        """See LinearScheme."""
        if not self._many(info, rows):
            return super().folded_ops(info, rows)
        return frozenset(op for op, word in GATES.items() if word in ACTIVATIONS)

    def apply_folded(
        self, layer: ParameterHolder, x_TI: torch.Tensor | PendingNorm, bias_O: torch.Tensor | None, gate: str = ""
    ) -> torch.Tensor:
        """See LinearScheme."""
        if isinstance(x_TI, PendingNorm) or not self._many(layer.info, len(x_TI)):
            return super().apply_folded(layer, x_TI, bias_O, gate)
        weight_OI = layer.get_parameter(WEIGHT)
        out = x_TI.new_empty((len(x_TI), len(weight_OI) // 2))
        return rows_product(x_TI, weight_OI[None], out, self._cores, activation=GATES[gate], pdl=self._pdl)

    def _many(self, info: LayerInfo, rows: int) -> bool:
        """Return whether that many rows are multiplied tile by tile."""
        outputs, inputs = sum(info.local_output_sizes), info.local_input_size
        if not self._wide or info.bias or info.dtype not in NAMES or inputs % ALIGNMENT or outputs % (2 * ALIGNMENT):
            return False
        return tiles(rows, outputs, gated=True) >= LEAST_TILES * self._cores
