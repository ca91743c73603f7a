"""How Model Optimizer stores matrices, by algorithm."""

from __future__ import annotations

from jackfield_quantization.scaled import Grid, Nibbles, ScaledStorage, Typed
from jackfield_quantization.unquantized_scheme import WEIGHT

SCALE, SECOND = "weight_scale", "weight_scale_2"
PREPARED = "pre_quant_scale"
"""A factor on each input of the layer."""
BLOCK = 128


def storage_of(algorithm: str) -> ScaledStorage:
    """Return the storage of one of :data:`jackfield_quantization.modelopt.ALGORITHMS`."""
    if "NVFP4" in algorithm:
        # Scales of 16 numbers are 8-bit floats; a second one is for all of them.
        return ScaledStorage(Nibbles(WEIGHT), Grid((SCALE,), 1, 16), factor=SECOND, inputs=PREPARED)
    grids = {"MXFP8": Grid((SCALE,), 1, 32, "uint8"), "FP8_PB_WO": Grid((SCALE,), BLOCK, BLOCK)}
    return ScaledStorage(Typed("float8_e4m3fn"), grids.get(algorithm, Grid((SCALE,))), inputs=PREPARED)
