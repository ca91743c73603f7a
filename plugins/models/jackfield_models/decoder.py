"""One decoder for all dense architectures: what tells them apart is data in :class:`DecoderConfig`, and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    AttentionGroup,
    BuildContext,
    ConfigReader,
    ModelArchitecture,
    MoEConfig,
    PoolerConfig,
    TextConfig,
    WeightMap,
    WeightRule,
)
from jackfield_models.chunks import DualChunks, read_chunks
from jackfield_models.moe_parts import Sparse
from jackfield_models.names import LLAMA, Names, weight_map
from jackfield_models.rope import Rope, read_rope

if TYPE_CHECKING:
    from torch import nn

PRE = frozenset({"input_norm", "post_norm"})
POST = frozenset({"attention_norm", "mlp_norm"})
SANDWICH = PRE | POST

Layers = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A head over labels.

    Args:
        labels: how many. activation: from scores to probabilities, as in PoolerConfig. sources: its projections in the
            checkpoint: one, or two with a ReLU between. bias: whether they add one.
    """

    labels: int
    activation: str = ""
    sources: tuple[str, ...] = ("score",)
    bias: bool = False


class Mixing(Protocol):
    """What mixes tokens in a layer, as data; equal for layers that are alike."""

    @property
    def kind(self) -> str:
        """The kind of its attention group; ``decoder_model.MIXERS`` has its module."""
        ...

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        ...

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where its weights go, from and to these paths."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What mixes tokens beside attention, in the same layer: both see the same stream, and their results are added.

    Its states belong to a layer of their own, whose index is that of the layer plus the number of layers.

    Args:
        mixing: what it is. attention_in, attention_out, mixing_in, mixing_out: factors on inputs and results.
    """

    mixing: Mixing
    attention_in: float = 1.0
    attention_out: float = 1.0
    mixing_in: float = 1.0
    mixing_out: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(TextConfig):
    """What the decoder needs.

    Args:
        num_heads, num_kv_heads, head_size, intermediate_size: sizes. activation: HF's name. gated: the MLP multiplies
            two projections.
        norms: which norms a layer has: ``input_norm`` before attention, ``post_norm`` before the MLP,
            ``attention_norm`` and ``mlp_norm`` behind them. norm_eps, norm_kind, norm_offset, norm_weight, norm_bias:
            as BuildContext.norm takes them. final_norm: whether a norm comes before the head.
        order: ``sequential``; ``parallel``, where attention and MLP see the same stream; ``sum``, where the norms
            behind attention and MLP take the sum with the stream (the first transformer); ``weighted``, see
            ``residual_weights``.
        qkv_bias, output_bias, mlp_bias, head_bias: which projections add a bias.
        qk_norm: how queries and keys are normalized: not at all (``""``), each head with one weight for all
            (``head``) or with its own (``heads``), or all heads together (``projection``). qk_norm_kind: ``rms`` or
            ``layer``. qk_norm_bias, qk_norm_weight: whether it has one. qk_norm_last: it comes after the rotation.
            qk_norm_turned: only layers that rotate have it.
        ropes: per layer the rotary embedding, or None. windows: per layer the sliding window, or None. scales: per
            layer the factor on scores. softcap: on scores. alibi: slopes of linear biases of all heads, or ().
            window_kind: ``sliding``, or ``chunked_local`` for windows that begin at multiples of their size. sinks:
            whether each head has a logit that adds nothing.
            chunks: of dual-chunk attention, or None.
            temperature: (f, s): in layers that do not rotate, queries are multiplied by 1 + s * log(1 + floor((position
            + 1) / f)) (arXiv:2501.19399), or None.
            clip: largest number of q, k and v, or 0.
        positions: rows of the table of learned positions, or 0. position_offset: row of position 0.
        embed_size: width of the embedding and of the head, where projections connect them with the layers.
        embed_scale: factor on embeddings. embed_norm: whether a norm follows them.
        residual_scale: factor on what attention and MLP add. logit_scale, logit_softcap: on logits.
        sparse: experts in place of MLPs, or None.
        mixings: per layer what mixes tokens there instead of attention, or None; () for attention in all of them.
        beside: what mixes tokens beside attention in every layer, or None. no_mixer: layers where nothing mixes tokens.
        no_mlp: layers without an MLP. output_gate: what attention gives is weighed by a projection of its input.
        layer_norms: per layer which norms it has, where layers differ; () for ``norms`` in all of them.
        mlp_factors: on the gate before its activation, and on what an MLP adds, or None.
        residual_weights: per layer weights of (stream, attention, stream, MLP) where ``order`` is ``weighted``: each
            norm takes the stream, and what is added is added to its result.
        wide_stream: the residual stream is float32 whatever the weights are.
        scores: a head over labels in place of the one over tokens, or None. unit_head: the head's rows are scaled to
            length 1.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    norms: frozenset[str] = PRE
    norm_eps: float = 1e-6
    norm_kind: str = "rms"
    norm_offset: float = 0.0
    norm_weight: bool = True
    norm_bias: bool = True
    final_norm: bool = True
    order: str = "sequential"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str = ""
    qk_norm_kind: str = "rms"
    qk_norm_bias: bool = False
    qk_norm_weight: bool = True
    qk_norm_last: bool = False
    qk_norm_turned: bool = False
    ropes: tuple[Rope | None, ...] = ()
    windows: Layers = ()
    window_kind: str = "sliding"
    scales: tuple[float, ...] = ()
    softcap: float = 0.0
    alibi: tuple[float, ...] = ()
    sinks: bool = False
    chunks: DualChunks | None = None
    temperature: tuple[float, float] | None = None
    clip: float = 0.0
    positions: int = 0
    position_offset: int = 0
    embed_size: int = 0
    embed_scale: float = 1.0
    embed_norm: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    sparse: Sparse | None = None
    mixings: tuple[Mixing | None, ...] = ()
    beside: Beside | None = None
    no_mixer: frozenset[int] = frozenset()
    no_mlp: frozenset[int] = frozenset()
    layer_norms: tuple[frozenset[str], ...] = ()
    mlp_factors: tuple[float, float] | None = None
    residual_weights: tuple[tuple[float, float, float, float], ...] = ()
    output_gate: bool = False
    wide_stream: bool = False
    scores: Scores | None = None
    unit_head: bool = False

    def mixing(self, layer: int) -> Mixing | None:
        """Return what mixes tokens in a layer, or None for attention."""
        return self.mixings[layer] if self.mixings else None

    def norms_in(self, layer: int) -> frozenset[str]:
        """Return which norms a layer has."""
        norms = self.layer_norms[layer] if self.layer_norms else self.norms
        return norms - {"input_norm", "attention_norm"} if layer in self.no_mixer else norms

    @property
    def embed_width(self) -> int:
        """Width of the embedding and of the head."""
        return self.embed_size or self.hidden_size

    def modules(self) -> frozenset[str]:
        """Return which modules have weights: those of a layer by their name in it."""
        projected = self.embed_width != self.hidden_size
        there = {
            "norm": self.final_norm and self.norm_weight,
            "head": not self.tie_embeddings,
            "rotary": any(rope is not None and rope.fourier for rope in self.ropes),
            "positions": bool(self.positions),
            "embed_norm": self.embed_norm,
            "project_in": projected,
            "project_out": projected,
            "gate_up": self.gated,
            "up": not self.gated,
            "q_norm": bool(self.qk_norm) and self.qk_norm_weight,
            "k_norm": bool(self.qk_norm) and self.qk_norm_weight,
            "sinks": self.sinks,
            "gate": self.output_gate,
            **dict.fromkeys(self.norms.union(*self.layer_norms), self.norm_weight),
        }
        return frozenset({"embed", "qkv", "o", "down", *(name for name, is_there in there.items() if is_there)})


class Decoder(ModelArchitecture):
    """Base of the dense decoders. A subclass says how it differs from Llama: in names of keys and modules, in
    defaults, and in ``details``.
    """

    features: ClassVar[frozenset[str]] = frozenset({"taps", "embeddings_in"})
    tasks: ClassVar[frozenset[str]] = frozenset({"generate", "pool"})
    names: ClassVar[Names] = LLAMA
    keys: ClassVar[Mapping[str, str]] = {}
    """Keys that have another name than Llama's."""
    tied: ClassVar[bool] = False
    """Whether the head is the embedding where the configuration is silent."""
    eps: ClassVar[tuple[str, float]] = ("rms_norm_eps", 1e-6)
    """Key of the norms' epsilon, and its default."""
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")
    theta: ClassVar[float] = 10000.0
    part: ClassVar[float] = 1.0
    """Share of a head's features that rotate where the configuration is silent."""
    max_position: ClassVar[int] = 2048
    paired: ClassVar[bool] = False
    """Whether rotary pairs lie next to each other in a head, as in GPT-J."""

    @classmethod
    def config(cls, hf: ConfigReader) -> DecoderConfig:
        """See ModelArchitecture."""
        heads, width = cls.require(hf, "num_attention_heads"), cls.require(hf, "hidden_size")
        values: dict[str, Any] = {
            "vocab_size": cls.require(hf, "vocab_size"),
            "hidden_size": width,
            "num_layers": cls.require(hf, "num_hidden_layers"),
            "max_position": hf.get(cls.key("max_position_embeddings"), cls.max_position),
            "chunks": read_chunks(hf),
            "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or ""),
            "tie_embeddings": bool(hf.get("tie_word_embeddings", cls.tied)),
            "num_heads": heads,
            "num_kv_heads": hf.get(cls.key("num_key_value_heads"), heads),
            "head_size": hf.get("head_dim") or width // heads,
            "intermediate_size": cls.inner_size(hf, width),
            "norm_eps": hf.get(*cls.eps),
            "activation": hf.get(*cls.activation),
        }
        values |= cls.details(hf, values)
        config = DecoderConfig(**cls.with_layers(hf, values))
        check_chunks(config)
        return config

    @classmethod
    def inner_size(cls, hf: ConfigReader, width: int) -> int:
        """Return the MLP's inner size."""
        return cls.require(hf, "intermediate_size")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the architecture has besides, or otherwise; ``values`` is what was read so far."""
        return {}

    @classmethod
    def with_layers(cls, hf: ConfigReader, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in what is given layer by layer: no windows, one rotary embedding, one scale."""
        layers, size = values["num_layers"], values["head_size"]
        if "ropes" not in values:
            values["ropes"] = (read_rope(hf, size, theta=cls.theta, part=cls.part),) * layers
        values.setdefault("windows", (None,) * layers)
        values.setdefault("scales", (size**-0.5,) * layers)
        return values

    @classmethod
    def key(cls, name: str) -> str:
        """Return the configuration's key of what Llama calls ``name``."""
        return cls.keys.get(name, name)

    @classmethod
    def require(cls, hf: ConfigReader, name: str) -> int:
        """Return a size that the configuration must have."""
        return int(hf.require(cls.key(name), int))

    @classmethod
    def attention_groups(cls, config: DecoderConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture."""
        mixed = [layer for layer in range(config.num_layers) if layer not in config.no_mixer]
        plain = [layer for layer in mixed if config.mixing(layer) is None]
        kinds = {layer: (config.windows[layer], config.scales[layer]) for layer in plain}
        scales = sorted({scale for _, scale in kinds.values()}, reverse=True)
        groups = _mixing_groups(config)
        for window, scale in dict.fromkeys(kinds.values()):
            name = "full" if window is None else f"{config.window_kind}_{window}"
            groups.append(
                AttentionGroup(
                    name=name if len(scales) == 1 else f"{name}_{scales.index(scale)}",
                    kind="full" if window is None else config.window_kind,
                    layers=tuple(layer for layer, kind in kinds.items() if kind == (window, scale)),
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_size=config.head_size,
                    value_head_size=config.head_size,
                    scale=scale,
                    window=window,
                    softcap=config.softcap,
                    features=_features(config),
                    extra=_extra(config),
                    long_features={} if config.chunks is None else config.chunks.features(),
                )
            )
        return tuple(groups)

    @classmethod
    def experts(cls, config: DecoderConfig) -> MoEConfig | None:
        """See ModelArchitecture."""
        return config.sparse.experts if config.sparse is not None and config.sparse.layers else None

    @classmethod
    def pooler(cls, config: DecoderConfig) -> PoolerConfig:
        """See ModelArchitecture: tokens stand for labels where there is no head over labels."""
        if config.scores is None:
            return PoolerConfig(token_labels=config.vocab_size)
        return PoolerConfig(labels=config.scores.labels, activation=config.scores.activation)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        return weight_map(cls.names, config, paired=cls.paired)

    @classmethod
    def build(cls, config: DecoderConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_models.decoder_model import DecoderModel

        return DecoderModel(config, cls.attention_groups(config), ctx)


def _mixing_groups(config: DecoderConfig) -> list[AttentionGroup]:
    """Return the groups of layers in which something else than attention mixes tokens."""
    found: list[tuple[Mixing, list[int]]] = []
    for layer in range(config.num_layers):
        mixing = config.mixing(layer)
        if mixing is None or layer in config.no_mixer:
            continue
        alike = next((layers for other, layers in found if other == mixing), None)
        if alike is None:
            found.append((mixing, [layer]))
        else:
            alike.append(layer)
    names = [mixing.kind for mixing, _ in found]
    groups = []
    for number, (mixing, layers) in enumerate(found):
        name = mixing.kind if names.count(mixing.kind) == 1 else f"{mixing.kind}_{number}"
        groups.append(mixing.group(name, tuple(layers)))
    if config.beside is not None:
        mixing, count = config.beside.mixing, config.num_layers
        groups.append(mixing.group(mixing.kind, tuple(range(count, 2 * count))))
    return groups


def _features(config: DecoderConfig) -> frozenset[str]:
    there = {
        "gqa": config.num_kv_heads != config.num_heads,
        "alibi": bool(config.alibi),
        "sinks": config.sinks,
    }
    return frozenset(name for name, is_there in there.items() if is_there)


def _extra(config: DecoderConfig) -> dict[str, Any]:
    slopes: dict[str, Any] = {"alibi_slopes": config.alibi} if config.alibi else {}
    return slopes if config.chunks is None else {**slopes, **config.chunks.extra()}


def windows_by_type(types: list[str], window: int | None) -> Layers:
    """Return each layer's window from HF's ``layer_types``.

    Raises:
        CheckpointError: a layer is of a type that is neither full nor sliding attention.
    """
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layers of these types are not known: {', '.join(unknown)}",
            field="config.json: layer_types",
            value=types,
            remedy="this architecture has full_attention and sliding_attention",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def every(count: int, layers: int) -> list[str]:
    """Return layer types where every ``count``-th layer has full attention and the others a window."""
    return ["full_attention" if count and (i + 1) % count == 0 else "sliding_attention" for i in range(layers)]


def check_chunks(config: DecoderConfig) -> None:
    """Refuse dual-chunk attention together with what it is not defined for.

    Raises:
        CheckpointError: the configuration asks for both.
    """
    if config.chunks is None:
        return
    there = {
        "sliding windows": any(config.windows),
        "layers that do not rotate, or rotate by Fourier series": any(r is None or r.fourier for r in config.ropes),
        "layers without attention": any(config.mixings) or config.beside is not None,
        "norms behind rotations": config.qk_norm_last,
    }
    if found := [what for what, is_there in there.items() if is_there]:
        raise CheckpointError(
            f"dual-chunk attention is not defined for {', '.join(found)}",
            field="config.json: dual_chunk_attention_config",
            value=found,
            remedy="set it to null in model.hf_overrides to count distances as usual",
        )


def expect(hf: ConfigReader, **wanted: Any) -> None:
    """Read keys that must have one value, or be absent.

    Raises:
        CheckpointError: one of them has another value: the architecture as it is written here would compute something
            else.
    """
    wrong = {key: hf.get(key) for key, value in wanted.items() if hf.get(key) not in (None, value)}
    if wrong:
        listing = ", ".join(f"{key} = {value!r}" for key, value in wrong.items())
        raise CheckpointError(
            f"the configuration asks for what this architecture does not do: {listing}",
            field="config.json",
            value=sorted(wrong),
            remedy="use a plugin that knows these values",
        )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head (ALiBi, arXiv:2108.12409): powers of one base for the largest power of two of
    heads, and for the others every second power of the root of that base.
    """
    whole = 1 << (heads.bit_length() - 1)
    base = 2.0 ** (-8.0 / whole)
    first = [base ** (i + 1) for i in range(whole)]
    return tuple(first + [(base**0.5) ** (2 * i + 1) for i in range(heads - whole)])
