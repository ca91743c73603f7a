"""What decoders with experts have besides: sizes, and where checkpoints keep experts, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.interfaces import ConfigReader, MoEConfig, RowSlice, WeightRule

if TYPE_CHECKING:
    from jackfield_models.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """Experts in place of the MLP.

    Args:
        experts: of a block. layers: that have one. shared_size: inner size of the experts that every token goes to, all
            together, or 0. shared_gate: whether a gate weighs them. router_bias: whether the router has a bias.
        router_dtype: type that the router computes in, or ``""`` for the model's. choice_bias: shape of the bias of the
            choice in a checkpoint, or (). latent: width of the experts, where projections connect them with the layer.
    """

    experts: MoEConfig
    layers: frozenset[int]
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    router_dtype: str = ""
    choice_bias: tuple[int, ...] = ()
    latent: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """Names of checkpoint modules and tensors, below a layer. Where there are several, checkpoints have either.

    Args:
        router, choice_bias: of the router. each: of the matrices of one expert, ``{}`` being its index; by shard.
            together: of tensors with the matrices of all experts, by target. transposed: those are [X, inputs,
            outputs]. interleaved: there gate and up take turns. shared, shared_gate: of the experts for every token.
            latent: of the projections to and from the experts' own width, ``latent_in`` and ``latent_out``.
    """

    router: tuple[str, ...] = ("mlp.gate",)
    choice_bias: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    each: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    together: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False
    interleaved: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)
    shared_gate: str = ""
    latent: Mapping[str, str] = field(default_factory=dict)


PROJECTIONS = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
PACKED = ("blocks", "scales")
"""What names of tensors of all experts end with, where they are packed in blocks (gpt-oss)."""
NUMBERED = {"gate_up.gate": "w1", "gate_up.up": "w3", "down": "w2"}


def expert_names(below: str = "mlp", beside: str = "shared_experts", **others: Any) -> ExpertNames:
    """Return what most checkpoints have: three projections for each expert, or two tensors for all of them."""
    values: dict[str, Any] = {
        "router": (f"{below}.gate",),
        "choice_bias": (f"{below}.gate.e_score_correction_bias",),
        "each": {key: (f"{below}.experts.{{}}.{name}",) for key, name in PROJECTIONS.items()},
        "together": {"gate_up": (f"{below}.experts.gate_up_proj",), "down": (f"{below}.experts.down_proj",)},
        "shared": {key: f"{below}.{beside}.{name}" for key, name in PROJECTIONS.items()},
    }
    return ExpertNames(**{**values, **others})


def expert_rules(names: ExpertNames, sparse: Sparse, source: str, target: str) -> Iterator[WeightRule]:
    """Return where the weights of a layer's experts go, from and to these paths."""
    for below in names.router:
        yield WeightRule(f"{source}.{below}", f"{target}.router")
    if sparse.choice_bias:
        for below in names.choice_bias:
            yield WeightRule(f"{source}.{below}", f"{target}.choice_bias")
    for key, below in _pairs(names.each):
        part, _, shard = key.partition(".")
        for expert in range(sparse.experts.num_experts):
            yield WeightRule(f"{source}.{below.format(expert)}", f"{target}.experts.{part}", shard, expert=expert)
    for part, below in _pairs(names.together):
        yield from _together(names, sparse.experts, f"{source}.{below}", f"{target}.experts.{part}", part)
    yield from _shared(names, sparse, source, f"{target}.shared")
    if sparse.shared_gate:
        yield WeightRule(f"{source}.{names.shared_gate}", f"{target}.shared_gate")
    if sparse.latent:
        for part, below in names.latent.items():
            yield WeightRule(f"{source}.{below}", f"{target}.{part}")


def _pairs(names: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    for key, several in names.items():
        for name in several:
            yield key, name


def _together(names: ExpertNames, experts: MoEConfig, source: str, target: str, part: str) -> Iterator[WeightRule]:
    shards = ("gate", "up") if part == "gate_up" and experts.gated else ("up",) if part == "gate_up" else ("",)
    for place, shard in enumerate(shards):
        cut = None
        if len(shards) == 2 and names.interleaved:
            cut = RowSlice(place, place + 1, 2, experts.intermediate_size)
        elif len(shards) == 2:
            size = experts.intermediate_size
            cut = RowSlice(place * size, (place + 1) * size, 2 * size)
        yield WeightRule(source, target, shard, cut=cut, transposed=names.transposed)
        for suffix in PACKED:
            # Packed matrices are outputs first, whatever plain ones are.
            yield WeightRule(f"{source}_{suffix}", target, shard, cut=cut, suffix=suffix)
        if experts.bias:
            yield WeightRule(f"{source}_bias", target, shard, cut=cut, suffix="bias")


def _shared(names: ExpertNames, sparse: Sparse, source: str, target: str) -> Iterator[WeightRule]:
    size = sparse.shared_size
    fused = names.shared.get("gate_up.gate") == names.shared.get("gate_up.up")
    cuts = {"gate": RowSlice(0, size, 2 * size), "up": RowSlice(size, 2 * size, 2 * size)}
    for key, below in names.shared.items() if size else ():
        part, _, shard = key.partition(".")
        yield WeightRule(f"{source}.{below}", f"{target}.{part}", shard, cut=cuts.get(shard) if fused else None)


def layer_experts(config: DecoderConfig, layer: int) -> Sparse | None:
    """Return the experts of a layer, or None where it has an MLP."""
    sparse = config.sparse
    return sparse if sparse is not None and layer in sparse.layers else None


def first_int(hf: ConfigReader, *names: str) -> int:
    """Return the first of these keys that is there; raises CheckpointError, about the first name, when none is."""
    found = [value for name in names if (value := hf.get(name)) is not None]
    return int(found[0]) if found else int(hf.require(names[0], int))


def same(value: Any) -> Any:
    """Return the one value of a list of equal ones, which some configurations have in place of it; else the value."""
    if isinstance(value, list) and value and all(other == value[0] for other in value):
        return value[0]
    return value
