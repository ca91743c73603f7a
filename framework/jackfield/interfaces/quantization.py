"""QuantizationMethod: one checkpoint format run by one kernel family. Group ``jackfield.quantization_methods.v1``.

Several methods may serve the same format (a reference and a fast kernel compete for the same checkpoint). The
unquantized case is a method too. Legend: T rows of
activations, I input features, O output features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.facts import TensorFacts
from jackfield.interfaces.model_export import ModelExporter
from jackfield.interfaces.plugin import Plugin, Request, Settings
from jackfield.interfaces.sharding import OutputShard, Parallel, RankInfo
from jackfield.interfaces.weights import WeightMap, WeightRule

if TYPE_CHECKING:
    import torch

FORMATS = frozenset({"", "gguf", "gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4", "nvfp4"})
"""Checkpoint formats known by name; the vocabulary is open. The request's ``kind`` is the format; ``""`` means that
nothing is quantized.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationRequest(Request):
    """Asks for a method for the checkpoint's format.

    Args:
        config: the raw quantization configuration of the checkpoint.
        storage_dtypes: storage types that occur in the checkpoint (``ggml:Q4_1``, ``bfloat16``).
        online: a format to convert to at load, or ``""``.
        rank: this rank among those that share the layers.
    """

    config: Mapping[str, object] = field(default_factory=dict)
    storage_dtypes: frozenset[str] = frozenset()
    online: str = ""
    rank: RankInfo = RankInfo()


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """All that is known about one linear (or embedding) layer before its weights are read.

    Args:
        name: module path in the model (``layers.3.attn.qkv``).
        input_size: I, all ranks together.
        shards: the checkpoint matrices stacked along the output dimension, in order.
        parallel: how ranks share it.
        input_unit: input columns that must stay together when a ROW layer is cut.
        bias: whether the layer adds a bias.
        dtype: computation type, in torch's words.
        role: ``linear``, ``embedding`` (rows are looked up), ``head`` (output projection) or ``experts``.
        sources: checkpoint module of each shard (``model.layers.3.self_attn.q_proj``), for not-to-convert lists.
        tensors: facts of the checkpoint tensors of each shard, by shard name and then by suffix (``weight``,
            ``weight.absmax``).
        rank: this rank.
        num_experts: for ``experts``: matrices stacked in front, else 0.
        batch_invariant: a row's result must not depend on how many rows there are; asked only of methods that declare
            the feature of this name.
    """

    name: str
    input_size: int
    shards: tuple[OutputShard, ...]
    parallel: Parallel
    input_unit: int = 1
    bias: bool = False
    dtype: str = "float32"
    role: str = "linear"
    sources: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, TensorFacts]] = field(default_factory=dict)
    rank: RankInfo = RankInfo()
    num_experts: int = 0
    batch_invariant: bool = False

    @property
    def local_input_size(self) -> int:
        """I of this rank."""
        return self.input_size // self.rank.size if self.parallel is Parallel.ROW else self.input_size

    @property
    def local_output_sizes(self) -> tuple[int, ...]:
        """O of this rank, shard by shard."""
        if self.parallel is Parallel.COLUMN:
            return tuple(shard.local_size(self.rank) for shard in self.shards)
        return tuple(shard.size for shard in self.shards)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a layer as data: all that allocation, sharding and loading need.

    Args:
        name: attribute on the layer; unique in it, and without dots.
        suffix: what follows the module in the checkpoint tensor's name (``weight``, ``scales``, ``weight.absmax``).
        shape: shape on this rank.
        dtype: storage type, in torch's words.
        output_dim: dimension that runs along O, or ``None`` (a scale for the whole matrix).
        input_dim: dimension that runs along I, or ``None``.
        output_pack: logical output rows per stored element along ``output_dim``.
        output_repeat: outputs that one element of the checkpoint's tensor stands for (scales of blocks); it is repeated
            when it is loaded, so that cuts may go through blocks. ``shape`` is that after repeating.
        input_pack: logical input columns per stored element along ``input_dim`` (8 for int4 in int32; 32/18
            bytes-per-block formats use ``input_block``).
        input_block: (logical columns, stored elements) of one indivisible block along ``input_dim``; overrides
            ``input_pack``.
        shard: name of the one shard it belongs to (``""`` is the name of a single shard), or ``None`` when all shards
            are stacked in it along ``output_dim``.
        optional: the checkpoint may lack it.
        opaque: outputs cannot be told apart in it, although it speaks of single ones: rules that cut or reorder them
            are errors.
        text: bytes of a text, behind which spaces fill the shape: those of other experts may be longer.
    """

    name: str
    suffix: str
    shape: tuple[int, ...]
    dtype: str
    output_dim: int | None = 0
    input_dim: int | None = 1
    output_pack: int = 1
    output_repeat: int = 1
    input_pack: int = 1
    input_block: tuple[int, int] | None = None
    shard: str | None = None
    optional: bool = False
    opaque: bool = False
    text: bool = False


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """The quantized input a scheme takes, so that a norm or an activation can quantize in place.

    Args:
        dtype: ``int8``, ``float8_e4m3fn``. granularity: ``token``, ``tensor`` or ``group``. group_size: for
            ``group``. dynamic: whether scales are computed per step.
    """

    dtype: str
    granularity: str
    group_size: int = 0
    dynamic: bool = True


@dataclass(frozen=True, slots=True)
class QuantizedActivation:
    """Rows quantized before a linear layer: ``values`` [T, I] and ``scales`` ([T], [T, I / group] or [])."""

    values: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """Rows before a root-mean-square norm (arXiv:1910.07467) that the linear layer computes along with its product. All
    tensors are contiguous and of one type.

    Args:
        x: [T, I]. residual: [T, I] to add first, or None. total: [T, I], where the layer leaves ``x + residual``,
            rounded; None without a residual. weight: [I], of the norm. eps: added to the mean square.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    total: torch.Tensor | None
    weight: torch.Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.x)


class ParameterHolder(Protocol):
    """The layer as a scheme sees it: its facts, and its parameters as attributes."""

    info: LayerInfo

    def get_parameter(self, target: str) -> torch.Tensor:
        """Return the parameter called ``target``."""
        ...

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Drop all weight parameters (not the bias) and hold these instead."""
        ...


class LinearScheme:
    """How one layer stores and applies its weight."""

    layout: ClassVar[str] = "dense"
    """For experts: which of :data:`jackfield.interfaces.moe.LAYOUTS` the parameters are in once they are final."""
    becomes_dense: ClassVar[bool] = False
    """Whether all that is left once the parameters are final is one ``weight`` in the computation type: the layer is
    then run by the method that was chosen for plain layers.
    """

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the parameters to allocate and load for the layer, bias excluded."""
        raise NotImplementedError

    def finalize(self, layer: ParameterHolder) -> None:
        """Turn loaded parameters into the form :meth:`apply` wants. Called exactly once, after all parameters are
        loaded.
        """

    def activation_spec(self, info: LayerInfo, rows: int) -> ActivationSpec | None:
        """Return the quantized input that this scheme likes best for that many rows, or None for plain activations. It
        takes plain ones in any case.
        """
        return None

    def folded_ops(self, info: LayerInfo, rows: int) -> frozenset[str]:
        """Return the ops, of those that come right before and after a product, which ``apply_folded`` computes along
        with it for that many rows: ``rms_norm`` and ``fused_add_rms_norm`` before it, ``silu_and_mul`` and its kin
        after it.
        """
        return frozenset()

    def apply(
        self,
        layer: ParameterHolder,
        x_TI: torch.Tensor | QuantizedActivation,
        bias_O: torch.Tensor | None,
        out_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``x @ W.T + bias``, in ``out`` when given."""
        raise NotImplementedError

    def apply_folded(
        self, layer: ParameterHolder, x_TI: torch.Tensor | PendingNorm, bias_O: torch.Tensor | None, gate: str = ""
    ) -> torch.Tensor:
        """Return ``x @ W.T + bias`` with what belongs to it: the norm of pending rows before, and after it the op
        ``gate``, which makes [T, O / 2] of it. Asked for only what ``folded_ops`` names.
        """
        raise NotImplementedError

    def lookup(self, layer: ParameterHolder, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows ``W[ids]`` in the computation type (role ``embedding``)."""
        raise NotImplementedError

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the weight [O, I] in the computation type."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CacheScheme:
    """Scales of a quantized KV cache that a checkpoint ships.

    Args:
        dtype: storage type that the checkpoint's configuration names, or ``""``. scale_suffixes: checkpoint suffixes
            of scales by what they scale: ``k``, ``v``, ``kv`` for both; others (``q``) are known and have no use.
            more_suffixes: further suffixes, and what they scale.
    """

    dtype: str
    scale_suffixes: Mapping[str, str] = field(default_factory=dict)
    more_suffixes: Mapping[str, str] = field(default_factory=dict)

    def is_scale(self, name: str) -> bool:
        """Return whether a checkpoint tensor is one of the scales."""
        return name.endswith(tuple(f".{suffix}" for suffix in (*self.scale_suffixes.values(), *self.more_suffixes)))

    def role(self, name: str) -> str:
        """Return what a checkpoint tensor scales, or ``""`` where it is none of the scales."""
        if not self.is_scale(name):
            return ""
        known = {suffix: role for role, suffix in self.scale_suffixes.items()} | dict(self.more_suffixes)
        return next(role for suffix, role in known.items() if name.endswith(f".{suffix}"))


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Checkpoint tensors that belong to many layers at once.

    Args:
        names: tensor of the checkpoint by the suffix that layers call it. ignore: patterns (regular expressions on full
            tensor names) of further copies, which nothing takes.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    def added_to(self, weights: WeightMap) -> WeightMap:
        """Return a weight map that brings them to every layer that has a parameter of such a suffix."""
        if not self.names and not self.ignore:
            return weights
        places = dict.fromkeys((rule.target, rule.shard) for rule in weights.rules)
        rules = [
            WeightRule(name, target, shard, suffix=suffix)
            for suffix, name in self.names.items()
            for target, shard in places
        ]
        return replace(weights, rules=(*weights.rules, *rules), ignore=(*weights.ignore, *self.ignore))


class Exporter:
    """Writes dense matrices as a checkpoint has them that is quantized."""

    calibrates: ClassVar[bool] = False
    """Whether :meth:`calibrated` is called in place of :meth:`tensors`: it looks at what matrices are given."""
    scales: ClassVar[bool] = False
    """Whether :meth:`factors` is called before :meth:`calibrated`, where factors can be moved to what comes before."""

    def config(self, plain: Sequence[str]) -> Mapping[str, object]:
        """Return the ``quantization_config`` of the checkpoint; the modules ``plain`` were left as they are."""
        raise NotImplementedError

    def tensors(self, weight_OI: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensors of one module, by suffix."""
        raise NotImplementedError

    def factors(self, weights: Sequence[torch.Tensor], moments_II: torch.Tensor) -> torch.Tensor:
        """Return positive factors [I], float32, by which the columns of matrices are to be multiplied before they are
        quantized. What comes before is divided by them.

        Args:
            weights: matrices [O, I] that take the same inputs. moments_II: as for :meth:`calibrated`.
        """
        raise NotImplementedError

    def calibrated(
        self, weight_OI: torch.Tensor, moments_II: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return the tensors of one module, by suffix, and the matrix [O, I] that they stand for.

        Args:
            moments_II: the mean product of every two inputs, float32.
        """
        raise NotImplementedError


class QuantizationMethod(Plugin):
    """One checkpoint format run by one kernel family."""

    family: ClassVar[str] = "quantization_methods"
    writes: ClassVar[str] = ""
    """Format that its :meth:`exporter` or :meth:`model_exporter` writes, in the user's word, where that is not the
    method's name.
    """

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> Any:
        """Return the method's own spec, read from the checkpoint's quantization config.

        Raises:
            ConfigError: a key has a value the method does not know.
        """
        return None

    @classmethod
    def configure(cls, spec: Any, settings: Settings) -> Any:
        """Return the spec with the user's options of this plugin in it.

        Raises:
            ConfigError: an option has a value that the method does not know.
        """
        return spec

    @classmethod
    def spec_of(cls, config: Mapping[str, object], settings: Settings) -> Any:
        """Return the spec of a checkpoint with the user's options in it.

        Args:
            config: its quantization config. settings: of this plugin.

        Raises:
            JackfieldError: as :meth:`parse` and :meth:`configure`.
        """
        return cls.configure(cls.parse(config), settings)

    @classmethod
    @abstractmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """Return the scheme for one layer, or None to leave this layer unquantized."""

    @classmethod
    def experts_layout(cls, spec: Any) -> str:
        """Return the layout that experts are in once their parameters are final; see
        :data:`jackfield.interfaces.moe.LAYOUTS`.
        """
        return "dense"

    @classmethod
    def exporter(cls, spec: Any) -> Exporter | None:
        """Return what writes checkpoints with the numbers that this method makes of dense weights, or None."""
        return None

    @classmethod
    def model_exporter(cls, spec: Any) -> ModelExporter | None:
        """Return what writes dense models whole, into another kind of container, or None. It is asked for before
        :meth:`exporter`.
        """
        return None

    @classmethod
    def cache_scheme(cls, spec: Any) -> CacheScheme | None:
        """Return how the checkpoint quantizes the KV cache, or None."""
        return None

    @classmethod
    def shared_tensors(cls, tensors: Mapping[str, TensorFacts], spec: Any) -> SharedTensors:
        """Return the tensors that many layers take, or that belong to none: those that are modules of their own, below
        the layers' modules, in a checkpoint whose ``tensors`` are all of it.
        """
        return SharedTensors()
