"""Every architecture that has no plugin of its own, through the modules that transformers has for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    ANY,
    AttentionGroup,
    Band,
    BuildContext,
    ConfigReader,
    ModelArchitecture,
    ModelRequest,
    Preference,
    Reason,
    TextConfig,
    WeightMap,
)

if TYPE_CHECKING:
    from torch import nn

COST = (
    "the fallback: runs transformers' own modules around this engine's attention, cache and linear layers; it costs "
    "fused projections and norms, recorded steps (graphs), and experts shared among devices"
)


class UnfitError(Exception):
    """A model that the fallback cannot run, with the reason."""

    def __init__(self, code: str, fact: str, detail: str, remedy: str = "") -> None:
        super().__init__(detail)
        self.reason = Reason(code, fact, detail, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """The attention of one layer, as transformers' code was seen to ask for it.

    Args:
        path: of its module. kind: ``full`` or ``sliding``. Other fields as in AttentionGroup.
    """

    path: str
    kind: str
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    softcap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersConfig(TextConfig):
    """What is known of a model of transformers.

    Args:
        architecture: name of its class. keys: its config.json. mixers: the attention of each layer. kept: linear layers
            whose weights its code touches by itself; they stay as transformers makes them. weights: where the tensors
            of its checkpoint go.
    """

    architecture: str
    keys: Mapping[str, Any]
    mixers: tuple[Mixer, ...]
    kept: frozenset[str] = frozenset()
    weights: WeightMap = field(default_factory=lambda: WeightMap(()))


class Transformers(ModelArchitecture):
    """``transformers``: the fallback for architectures that no plugin names.

    Its ``config`` counts every key of config.json as read: transformers reads them. What a layer is follows from what
    transformers' code does: it is run once without data, on the meta device, and its calls of attention and its masks
    are watched. Attention, cache, linear layers (with quantization and tensor parallelism), embedding and head are
    this engine's; norms, activations, rotary embeddings and experts are transformers'.
    """

    name = "transformers"
    summary = "the fallback: architectures without a plugin of their own, by transformers' modules"
    kinds: ClassVar[frozenset[str]] = ANY
    tasks: ClassVar[frozenset[str]] = frozenset({"generate", "pool"})
    features: ClassVar[frozenset[str]] = frozenset({"embeddings_in"})
    recordable: ClassVar[bool] = False

    @classmethod
    def check(cls, request: ModelRequest) -> Sequence[Reason]:
        """Return why transformers' code cannot run here: at most one reason, the first that is found. Without a
        configuration the question is about the architecture, with transformers' defaults.
        """
        if request.rivals:
            detail = f"'{request.kind}' has a plugin of its own: {', '.join(request.rivals)}"
            return [
                Reason("rivals", "rivals", detail, f"set model.implementation to '{cls.name}' to use it all the same")
            ]
        if not request.kind or request.kind.startswith("gguf:"):
            return [Reason("kind", "kind", "GGUF files have no configuration that transformers could build from")]
        from jackfield_models.transformers_trace import inspect_model

        try:
            inspect_model(request.kind, request.config, request.quantization)
        except UnfitError as unfit:
            return [unfit.reason]
        return []

    @classmethod
    def preference(cls, request: ModelRequest) -> Preference:
        """Return the lowest band: right but slow."""
        return Preference(Band.FALLBACK, COST)

    @classmethod
    def config(cls, hf: ConfigReader) -> TransformersConfig:
        """See ModelArchitecture."""
        from jackfield_models.transformers_trace import inspect_model

        keys = dict(hf.everything())
        try:
            return inspect_model(keys["architectures"][0], keys)
        except UnfitError as unfit:
            why = unfit.reason
            raise CheckpointError(
                f"transformers cannot be the fallback for this model: {why.detail}",
                field=why.fact,
                value=keys["architectures"],
                remedy=why.remedy or "install a plugin for the architecture",
            ) from unfit

    @classmethod
    def attention_groups(cls, config: TransformersConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, mixer in enumerate(config.mixers):
            alike.setdefault(_shape(mixer), []).append(index)
        groups, names = [], set[str]()
        for layers in alike.values():
            mixer = config.mixers[layers[0]]
            name = mixer.kind if mixer.window is None else f"{mixer.kind}_{mixer.window}"
            name = name if name not in names else f"{name}_{layers[0]}"
            names.add(name)
            groups.append(_group(name, mixer, tuple(layers)))
        return tuple(groups)

    @classmethod
    def weight_map(cls, config: TransformersConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        return config.weights

    @classmethod
    def build(cls, config: TransformersConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_models.transformers_model import FallbackModel

        return FallbackModel(config, cls.attention_groups(config), ctx)


def _shape(mixer: Mixer) -> tuple[Any, ...]:
    sizes = (mixer.num_heads, mixer.num_kv_heads, mixer.head_size, mixer.value_head_size)
    return mixer.kind, mixer.window, mixer.scale, mixer.softcap, sizes


def _group(name: str, mixer: Mixer, layers: tuple[int, ...]) -> AttentionGroup:
    there = {"gqa": mixer.num_kv_heads != mixer.num_heads, "diff_kv": mixer.value_head_size != mixer.head_size}
    return AttentionGroup(
        name=name,
        kind=mixer.kind,
        layers=layers,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_size=mixer.head_size,
        value_head_size=mixer.value_head_size,
        scale=mixer.scale,
        window=mixer.window,
        softcap=mixer.softcap,
        features=frozenset(feature for feature, is_there in there.items() if is_there),
    )
