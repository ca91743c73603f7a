"""Methods that convert dense weights when they are loaded, because the user asks for that. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jackfield.errors import ConfigError
from jackfield.interfaces import (
    Band,
    Exporter,
    LayerInfo,
    LinearScheme,
    Option,
    Preference,
    QuantizationMethod,
    QuantizationRequest,
    Settings,
)
from jackfield_native.toolchain import unavailable
from jackfield_quantization.matching import REGEX, compiled_source, named, sources_of

PATTERNS = "names or parts of names, globs, or expressions behind 're:', separated by commas"


@dataclass(frozen=True, slots=True)
class OnlineSpec:
    """Which layers are converted: those that ``only`` means (all, where it is empty), less those of ``ignore``."""

    ignore: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def takes(self, module: str) -> bool:
        """Return whether a module is converted."""
        return (not self.only or named(module, self.only)) and not named(module, self.ignore)


class OnlineMethod(QuantizationMethod):
    """Base: dense checkpoints whose linear layers and experts become something smaller. Embedding and output projection
    stay as they are, and so do layers whose inputs are not whole blocks.
    """

    kinds: ClassVar[frozenset[str]] = frozenset({""})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    api: ClassVar[tuple[int, int]] = (1, 3)
    opt_in: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Option]] = {
        "ignore": Option(str, "", f"layers that stay plain: {PATTERNS}"),
        "only": Option(str, "", f"the layers to convert, if not all: {PATTERNS}"),
    }

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> OnlineSpec:
        """Return the spec of all layers."""
        return OnlineSpec()

    @classmethod
    def configure(cls, spec: OnlineSpec, settings: Settings) -> OnlineSpec:
        """Return the spec of the layers that the user means.

        Raises:
            ConfigError: an expression cannot be read.
        """
        ignore, only = (patterns_in(str(settings.values.get(name) or "")) for name in ("ignore", "only"))
        return OnlineSpec(ignore, only)

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return FALLBACK: weights are expanded before each product."""
        return Preference(Band.FALLBACK, "saves memory, but expands weights before each product")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: OnlineSpec | None) -> LinearScheme | None:
        """Return the scheme of a layer, or None to leave it alone.

        Raises:
            ConfigError: the options mean some matrices of a fused layer and not the others.
        """
        sources = sources_of(info)
        taken = {shard: (spec or OnlineSpec()).takes(source) for shard, source in sources.items()}
        if len(set(taken.values())) > 1 and info.role in ("linear", "experts"):
            raise ConfigError(
                f"matrices of the layer {info.name} are stacked and can only be converted together",
                field=f"plugins.options.{cls.name}",
                value=[sources[shard] for shard, is_taken in taken.items() if is_taken],
                remedy=f"name all of them or none: {', '.join(sources.values())}",
            )
        return cls.converted(info) if all(taken.values()) else None

    @classmethod
    def exporter(cls, spec: Any) -> Exporter | None:
        """Return what writes compressed-tensors checkpoints."""
        from jackfield_quantization.online_export import EXPORTERS

        return EXPORTERS.get(cls.name)

    @classmethod
    def converted(cls, info: LayerInfo) -> LinearScheme | None:
        """Return the scheme of a layer that is to be converted, or None where it cannot be."""
        raise NotImplementedError


class BlockMethod(OnlineMethod):
    """Base: numbers in blocks along the inputs, with a scale each; see ``online_schemes.CONVERSIONS``."""

    block: ClassVar[int] = 32
    layout: ClassVar[str] = "dense"
    """Of experts; ``dense`` leaves them alone."""
    native: ClassVar[bool] = False
    """Whether kernels in C read the blocks."""

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return SUPPORTED where kernels read blocks as they are, else FALLBACK."""
        if cls.native and runs_native(request.device.type if request.device else "", request.dtype):
            return Preference(why="kernels in C read the blocks as they are")
        return super().preference(request)

    @classmethod
    def converted(cls, info: LayerInfo) -> LinearScheme | None:
        """See OnlineMethod."""
        if info.role not in ("linear", "experts") or info.local_input_size % cls.block:
            return None
        from jackfield_quantization import online_schemes as schemes

        if info.role == "experts":
            experts = {"int8": schemes.Int8Experts, "int4": schemes.Int4Experts}
            return experts[cls.layout]() if cls.layout in experts else None
        if cls.native and not unavailable():
            return schemes.MaybeNative(cls.name)
        return schemes.BlockScheme(cls.name)

    @classmethod
    def experts_layout(cls, spec: Any) -> str:
        """Return the layout of converted experts."""
        return cls.layout


class Int8(BlockMethod):
    """Whole numbers of eight bits in blocks of 32, symmetric, each block with a scale in float16."""

    name: ClassVar[str] = "int8"
    summary: ClassVar[str] = "dense weights, converted to int8 in blocks of 32 at load"
    layout: ClassVar[str] = "int8"
    native: ClassVar[bool] = True


class Int4(BlockMethod):
    """Whole numbers of four bits in blocks of 32, each block with a scale in float16 and a zero point."""

    name: ClassVar[str] = "int4"
    summary: ClassVar[str] = "dense weights, converted to int4 in blocks of 32 at load"
    layout: ClassVar[str] = "int4"
    native: ClassVar[bool] = True


class Mxfp8(BlockMethod):
    """float8_e4m3fn in blocks of 32 that share an exponent (OCP Microscaling 1.0). Experts stay as they are."""

    name: ClassVar[str] = "mxfp8"
    summary: ClassVar[str] = "dense weights, converted to mxfp8 at load"


class Nf4(BlockMethod):
    """Quantiles of a normal distribution in blocks of 64 (arXiv:2305.14314). Experts stay as they are."""

    name: ClassVar[str] = "nf4"
    summary: ClassVar[str] = "dense weights, converted to nf4 at load"
    block: ClassVar[int] = 64


class Nvfp4(BlockMethod):
    """Floats of four bits (E2M1) in blocks of 16, with scales in float8_e4m3fn and one for the whole matrix. Experts
    stay as they are.
    """

    name: ClassVar[str] = "nvfp4"
    summary: ClassVar[str] = "dense weights, converted to nvfp4 at load"
    block: ClassVar[int] = 16


def patterns_in(text: str) -> tuple[str, ...]:
    """Return the patterns of an option.

    Raises:
        ConfigError: an expression cannot be read.
    """
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for pattern in found:
        if pattern.startswith(REGEX):
            compiled_source(pattern.removeprefix(REGEX))
    return found


def runs_native(device: str, dtype: str) -> bool:
    """Return whether the kernels in C run there."""
    return device == "cpu" and dtype in ("float32", "bfloat16") and not unavailable()
