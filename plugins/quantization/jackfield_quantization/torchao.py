"""``torchao``: checkpoints of tensors that are made of others, in both versions that the library has had of them. Each
module says of itself how it is stored: the types and shapes of its tensors tell it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import LayerInfo, TensorFacts
from jackfield_quantization.fp8_kept import KeptFp8
from jackfield_quantization.native_stored import NativeStored
from jackfield_quantization.stored_method import StoredMethod, unreadable

if TYPE_CHECKING:
    from jackfield_quantization.stored import Storage

START = "_weight_"
"""What names of a weight's parts begin with."""
INPUTS, FACTOR = f"{START}act_pre_scale", f"{START}per_tensor_scale"
UNUSED = tuple(f"{START}act_{part}" for part in ("quant_scale", "quant_zero_point", "per_tensor_scale"))
"""Of activations, which are not quantized."""
FLOATS = frozenset({"float8_e4m3fn", "float8_e5m2"})
EXPONENTS = frozenset({"float8_e8m0fnu", "uint8"})
REMEDY = (
    "what is read: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Int4PlainInt32Tensor (XPU), "
    "Int4TilePackedTo4dTensor, MXTensor and NVFP4Tensor, and of the first version plain, float8 and tensor-core-tiled "
    "layouts; load it there and save it so"
)
PACKINGS: Mapping[str, frozenset[str]] = {
    "int4_packing_format": frozenset({"plain", "plain_int32", "tile_packed_to_4d"}),
    "intx_packing_format": frozenset({"unpacked_to_int8"}),
    "packing_format": frozenset({"plain"}),
}
"""Settings of how numbers are packed, and their values that are read: others depend on a kernel that is not there, and
what they mean is written nowhere else.
"""
OTHERS = frozenset({"UIntxWeightOnlyConfig", "Int8DynamicActivationUIntxWeightConfig"})
"""Whose numbers another library packs, as it thinks best for a GPU."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a weight is made of: suffixes of its numbers, scales, zero points, and of pairs of the last two."""

    numbers: str
    scale: str
    zero: str
    both: str


FIRST = f"{START}tensor_impl_", f"{START}original_weight_tensor_tensor_impl_"
"""What names begin with in the first version of these tensors, of weights alone and where activations are quantized
too; releases up to 0.14 wrote it, in PyTorch files alone.
"""
NAMES = tuple(
    Names(*(f"{start}{part}" for part in (numbers, "scale", "zero_point", "scale_and_zero")))
    for start, of_numbers in ((START, ("qdata",)), *((s, ("int_data", "float8_data", "packed_weight")) for s in FIRST))
    for numbers in of_numbers
)


class TorchAo(StoredMethod):
    """8-bit floats, whole numbers of up to eight bits, microscaled floats, and of four bits in pairs or in tiles,
    dequantized at load. Activations are not quantized.
    """

    name: ClassVar[str] = "torchao"
    summary: ClassVar[str] = "torchao checkpoints (fp8, int8, int4, MX, NVFP4), dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"torchao"})

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> str:
        """Return the words of the configuration on how weights are quantized.

        Raises:
            ConfigError: in a way that nothing here reads.
        """
        stated = config.get("quant_type", "")
        for path, kind, data in settings(stated, "quant_type"):
            check_packing(path, kind, data)
        return str(stated).lower()

    @classmethod
    def experts_layout(cls, spec: str) -> str:
        """Return the layout of experts; some may be dense."""
        return "fp8" if "float8" in spec else "dense"

    @classmethod
    def left_alone(cls, info: LayerInfo, source: str, spec: Any) -> bool:
        """See StoredMethod."""
        return False

    @classmethod
    def looks_packed(cls, facts: Mapping[str, TensorFacts]) -> bool:
        """See StoredMethod."""
        return any(suffix.startswith(START) for suffix in facts)

    @classmethod
    def is_packed(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> bool:
        """See StoredMethod. Only the checkpoint's tensors tell how long they are."""
        return cls.looks_packed(facts)

    @classmethod
    def storage(cls, info: LayerInfo, source: str, facts: Mapping[str, TensorFacts], spec: Any) -> Storage:
        """See StoredMethod."""
        from jackfield_quantization.torchao_storage import storage_of

        names = next((names for names in NAMES if names.numbers in facts), None)
        if names is None or not {names.scale, names.both} & facts.keys():
            parts = ", ".join(sorted(suffix for suffix in facts if suffix.startswith(START)))
            raise unreadable(info, source, f"nothing reads a weight that is made of {parts}", REMEDY)
        found = storage_of(names, facts, info.input_size, spec)
        if found is None:
            numbers = facts[names.numbers]
            detail = f"nothing reads numbers of type {numbers.dtype} and shape {list(numbers.shape)}"
            others = [(suffix, facts[suffix]) for suffix in (names.scale, names.zero, names.both) if suffix in facts]
            beside = ", ".join(f"{suffix} ({fact.dtype}, {list(fact.shape)})" for suffix, fact in others)
            raise unreadable(info, source, f"{detail} beside {beside}", REMEDY)
        if names is NAMES[0] and names.zero not in facts and facts[names.numbers].dtype == "int8" and "intx" in spec:
            raise unreadable(info, source, f"it lacks {names.zero}", "the checkpoint is incomplete")
        return found


def settings(value: object, path: str) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Yield (place, class, fields) of all settings of torchao in a configuration, which may lie in one another: one
    for each module, for example.
    """
    if isinstance(value, Mapping):
        kind, data = value.get("_type"), value.get("_data")
        if isinstance(kind, str) and isinstance(data, Mapping):
            yield path, kind, data
        for key, inner in value.items():
            yield from settings(inner, path if key == "_data" else f"{path}.{key}")


def check_packing(path: str, kind: str, data: Mapping[str, object]) -> None:
    """Refuse settings of one class that pack numbers in an order that nothing here reads.

    Raises:
        ConfigError: they do.
    """
    field = f"quantization_config.{path}"
    if kind in OTHERS:
        remedy = "quantize the model by IntxWeightOnlyConfig"
        raise ConfigError(f"{kind} has gemlite pack numbers for a GPU", field=field, value=kind, remedy=remedy)
    for key, known in PACKINGS.items():
        if key not in data:
            continue
        stated = data[key]
        word = str(stated.get("_data") if isinstance(stated, Mapping) else stated).lower()
        if word not in known:
            message = f"numbers that {kind} packs as '{word}' are read by a kernel of their own alone"
            remedy = f"quantize the model with {key} one of {', '.join(sorted(known))}"
            raise ConfigError(message, field=f"{field}.{key}", value=word, remedy=remedy)
        if word == "tile_packed_to_4d" and data.get("int4_tile_packed_ntile", 8) != 8:
            message = "tiles of 16 outputs are in the order of AMD's matrix units"
            remedy = "quantize the model with int4_packing_format plain, or with tiles of 8 outputs"
            key = f"{field}.int4_tile_packed_ntile"
            raise ConfigError(message, field=key, value=data.get("int4_tile_packed_ntile"), remedy=remedy)


class NativeTorchAo(NativeStored, TorchAo):
    """``torchao``, packed."""

    name: ClassVar[str] = "native_torchao"
    summary: ClassVar[str] = "torchao checkpoints of whole numbers, packed; kernels in C"


class KeptTorchAo(KeptFp8, TorchAo):
    """``torchao``, kept."""

    name: ClassVar[str] = "torchao_kept"
    summary: ClassVar[str] = "torchao checkpoints in fp8 with scales per tensor or output, kept in fp8"
