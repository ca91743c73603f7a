"""GGUF weights that stay packed, on CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jackfield.interfaces import (
    Band,
    LayerInfo,
    LinearScheme,
    Option,
    Preference,
    QuantizationMethod,
    QuantizationRequest,
    Reason,
    Settings,
)
from jackfield_native.toolchain import unavailable
from jackfield_quantization.gguf import PREFIX, Gguf
from jackfield_quantization.unquantized import no_online_conversion

INTEGERS = (
    "multiply one to four rows as integers: rows are rounded to 16 bits, 32 numbers at a time; for processors with "
    "AVX2 and without AVX-512, others go on in float32, and so does model.batch_invariant"
)
PACKED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""Types that the kernels multiply with as they are stored; layers in others are dequantized at load."""


class NativeGguf(QuantizationMethod):
    """GGUF weights as they are stored. Few rows are multiplied with packed blocks in float32, bit for bit the values
    that dequantization gives, or as integers where the user wants that; for many rows the weight is dequantized a tile
    at a time.
    """

    name: ClassVar[str] = "native_gguf"
    summary: ClassVar[str] = "packed GGUF weights; kernels in C"
    kinds: ClassVar[frozenset[str]] = Gguf.kinds
    features: ClassVar[frozenset[str]] = Gguf.features | {"batch_invariant"}
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})
    requires: ClassVar[tuple[str, ...]] = Gguf.requires
    options: ClassVar[Mapping[str, Option]] = {
        "integers": Option(bool, False, INTEGERS),
    }

    @classmethod
    def configure(cls, spec: Any, settings: Settings) -> bool:
        """Return whether rows are multiplied as integers."""
        return bool(settings.values.get("integers"))

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject what ``gguf`` rejects, and machines that cannot build the kernels."""
        reason = unavailable()
        unread = [found for found in Gguf.check(request) if found.code != "online"]
        return [*unread, *no_online_conversion(cls.name, request), *([reason] if reason else [])]

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "weights stay packed and are read once for few rows")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme:
        """Return the scheme of a layer: packed where the kernels read all its types, else dequantized at load."""
        from jackfield_quantization.gguf_scheme import GgufScheme
        from jackfield_quantization.native_schemes import DequantizedScheme, PackedScheme

        if info.num_experts:
            return GgufScheme()
        # A head that shares an embedding's weight has no tensors; its scheme is made and never used.
        found = (info.tensors.get(shard.name, {}).get("weight") for shard in info.shards)
        words = {"" if facts is None else facts.dtype.removeprefix(PREFIX) for facts in found}
        return PackedScheme(integers=bool(spec)) if words <= PACKED else DequantizedScheme()
