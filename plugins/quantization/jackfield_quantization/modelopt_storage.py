"""How Model Optimizer stores matrices, by algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from jackfield.interfaces import TensorFacts
from jackfield_quantization.scaled import Grid, Nibbles, RowPairs, ScaledStorage, Typed
from jackfield_quantization.unquantized_scheme import WEIGHT

SCALE, SECOND = "weight_scale", "weight_scale_2"
PREPARED = "pre_quant_scale"
"""A factor on each input of the layer."""
BLOCK, MX_BLOCK = 128, 32
WHOLE_BYTES = ("W8A16", "W8A8_SQ_PER_CHANNEL")
WHOLE_NIBBLES = ("W4A16_AWQ", "W4A8_AWQ")


def storage_of(algorithm: str, facts: Mapping[str, TensorFacts], inputs: int) -> ScaledStorage | None:
    """Return the storage of one of :data:`jackfield_quantization.modelopt.ALGORITHMS`, or None where scales do not fit.

    Args:
        algorithm: see there. facts: of the module's tensors, which tell the size of groups. inputs: of the matrix.
    """
    if "NVFP4" in algorithm:
        # Scales of 16 numbers are 8-bit floats; a second one is for all of them.
        return ScaledStorage(Nibbles(WEIGHT), Grid((SCALE,), 1, 16), factor=SECOND, inputs=PREPARED)
    if "MXFP4" in algorithm:
        return ScaledStorage(Nibbles(WEIGHT), Grid((SCALE,), 1, MX_BLOCK, "uint8"))
    if algorithm in WHOLE_NIBBLES:
        # The second scale is for kernels that make 8-bit floats of these numbers; what they mean does not depend on it.
        groups = (*facts[SCALE].shape, 1)[1] if SCALE in facts else 1
        if not groups or inputs % groups:
            return None
        scale = Grid((SCALE,), 1, inputs // groups)
        return ScaledStorage(RowPairs(WEIGHT), scale, inputs=PREPARED, unused=(SECOND,))
    if algorithm in WHOLE_BYTES:
        return ScaledStorage(Typed("int8"), Grid((SCALE,)), inputs=PREPARED)
    grids = {"MXFP8": Grid((SCALE,), 1, MX_BLOCK, "uint8"), "FP8_PB_WO": Grid((SCALE,), BLOCK, BLOCK)}
    return ScaledStorage(Typed("float8_e4m3fn"), grids.get(algorithm, Grid((SCALE,))), inputs=PREPARED)
