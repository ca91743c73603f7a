"""``fp8_checkpoint``: checkpoints in 8-bit floats, as DeepSeek, vLLM, FBGEMM and Quark's plainest form have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.matching import named, names_in, wrong
from jackfield_quantization.stored_method import StoredMethod

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

ACTIVATIONS = ("dynamic", "static")
MXFP8, MX_BLOCK = "mxfp8", (1, 32)
"""A format of 8-bit floats whose scales are exponents of blocks of inputs, and those blocks."""
NARROW = "float8_"
"""What torch's words for 8-bit floats begin with."""


@dataclass(frozen=True, slots=True)
class Fp8Spec:
    """What a checkpoint says of its 8-bit floats.

    Args:
        block: outputs and inputs of a block with a scale of its own, or None for a scale per tensor or output. ignored:
            modules that are plain.
    """

    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()


class Fp8Checkpoint(StoredMethod):
    """Weights in 8-bit floats with a scale for the tensor, for each output or for each block.

    Dense at load; experts stay in 8-bit floats (layout ``fp8``). Activations are not quantized: scales of inputs are
    read and have no use.
    """

    name: ClassVar[str] = "fp8_checkpoint"
    summary: ClassVar[str] = "fp8 checkpoints; linear layers dequantized at load, experts kept in fp8"
    kinds: ClassVar[frozenset[str]] = frozenset({"fp8", "fbgemm_fp8", "fp8_e4m3", "deepseek_v4_fp8", MXFP8})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> Fp8Spec:
        """Return the spec.

        Raises:
            ConfigError: a value is not known.
        """
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ACTIVATIONS:
            raise wrong("activation_scheme", scheme, "one of dynamic, static")
        ignored = names_in(config, "ignored_layers", "modules_to_not_convert", "ignore")
        block = block_of(config.get("weight_block_size"))
        return Fp8Spec(MX_BLOCK if block is None and config.get("quant_method") == MXFP8 else block, ignored)

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: Fp8Spec) -> bool:
        """See StoredMethod."""
        return named(source, spec.ignored)

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return "weight" in facts and facts["weight"].dtype.startswith(NARROW)

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Fp8Spec) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.fp8_storage import fp8_storage

        return fp8_storage(spec.block)

    @classmethod
    def experts_layout(cls, spec: Any) -> str:
        """Return the layout of experts."""
        return "fp8"


def block_of(value: object) -> tuple[int, int] | None:
    """Return a block's size.

    Raises:
        ConfigError: it is none.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1]
    raise wrong("weight_block_size", value, "a pair of positive numbers")
