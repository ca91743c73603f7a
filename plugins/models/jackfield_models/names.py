"""Where checkpoints keep the modules of a decoder, as data, and the weight rules that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jackfield.interfaces import RowOrder, RowSlice, WeightMap, WeightRule
from jackfield_models.moe_parts import ExpertNames, expert_rules, layer_experts
from jackfield_models.scalings import scalings

if TYPE_CHECKING:
    from jackfield_models.decoder import DecoderConfig

ATTENTION = {"qkv.q": "self_attn.q_proj", "qkv.k": "self_attn.k_proj", "qkv.v": "self_attn.v_proj"}
GATED = {"gate_up.gate": "mlp.gate_proj", "gate_up.up": "mlp.up_proj", "down": "mlp.down_proj"}
NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
ATTENTION_PARTS = frozenset({"qkv", "gate", "o", "q_norm", "k_norm", "sinks"})
LAYER_NORMS = frozenset({"input_norm", "attention_norm", "post_norm", "mlp_norm"})
MLP_PARTS = frozenset({"gate_up", "up", "down", "post_norm", "mlp_norm"})
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Names:
    """Names of checkpoint modules.

    Args:
        top: source of each target outside the layers. layer: source of each target in a layer, below ``layers.N``;
            ``qkv.q`` is shard ``q`` of target ``qkv``. Shards with one source are fused in the checkpoint.
        layers: where the layers are. by_head: a fused qkv has the rows of each cache head together, not all queries
            first. transposed: matrices of the layers are [inputs, outputs]. ignore, droppable: as in WeightMap.
        each_head: norms over heads are modules of their own, ``NAME.0`` and so on. mixings: where in a layer the
            weights of what mixes tokens instead of attention are.
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    by_head: bool = False
    transposed: bool = False
    ignore: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    droppable: str = ""
    each_head: bool = field(default=False)
    mixings: str = "self_attn"
    experts: ExpertNames | None = None


TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "rotary": "model.rotary_emb"}
LLAMA = Names(TOP, {**ATTENTION, "o": "self_attn.o_proj", **GATED, **NORMS, **HEAD_NORMS})
GGUF_LAYER = {
    "qkv.q": "attn_q",
    "qkv.k": "attn_k",
    "qkv.v": "attn_v",
    "o": "attn_output",
    "gate_up.gate": "ffn_gate",
    "gate_up.up": "ffn_up",
    "down": "ffn_down",
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
GGUF = Names({"embed": "token_embd", "norm": "output_norm", "head": "output"}, GGUF_LAYER, "blk", ignore=())


def weight_map(names: Names, config: DecoderConfig, *, paired: bool) -> WeightMap:
    """Return the rules of a checkpoint; ``paired``: rotary pairs lie next to each other in it."""
    modules = config.modules()
    rules = [
        WeightRule(source, target, unit_rows=config.unit_head and target == "head")
        for target, source in names.top.items()
        if target in modules
    ]
    for index in range(config.num_layers):
        rules += _layer_rules(names, config, index, modules, paired=paired)
    ignore = names.ignore
    if config.tie_embeddings and "head" in names.top:
        head = names.top["head"].replace(".", r"\.")
        ignore += (rf"{head}\.weight",)
        if config.head_bias:
            rules.append(WeightRule(names.top["head"], "head"))
    return WeightMap(tuple(rules), ignore, names.droppable, tuple(scalings(config)))


def _layer_rules(
    names: Names, config: DecoderConfig, index: int, modules: frozenset[str], *, paired: bool
) -> Iterator[WeightRule]:
    rope, mixing = config.ropes[index], config.mixing(index)
    beside = mixing if config.beside is None else config.beside.mixing
    if beside is not None:
        yield from beside.rules(f"{names.layers}.{index}.{names.mixings}", f"layers.{index}.mixer")
    if mixing is not None or index in config.no_mixer:
        modules -= ATTENTION_PARTS
    modules -= LAYER_NORMS - config.norms_in(index)
    if index in config.no_mlp:
        modules -= MLP_PARTS
    sparse = layer_experts(config, index)
    if sparse is not None and names.experts is not None:
        yield from expert_rules(names.experts, sparse, f"{names.layers}.{index}", f"layers.{index}")
        modules -= {"gate_up", "up", "down"}
    for key, below in names.layer.items():
        part, _, shard = key.partition(".")
        if part not in modules:
            continue
        source, target = f"{names.layers}.{index}.{below}", f"layers.{index}.{part}"
        rows = _pairs(config, key, rope.size) if paired and rope is not None else None
        if part in ("q_norm", "k_norm") and names.each_head:
            for head in range(config.num_heads if part == "q_norm" else config.num_kv_heads):
                yield WeightRule(f"{source}.{head}", target, str(head))
            continue
        fused = (shard or part == "gate") and sum(other == below for other in names.layer.values()) > 1
        cut = _cut(config, part, shard, by_head=names.by_head) if fused else None
        yield WeightRule(source, target, shard, rows, cut=cut, transposed=names.transposed)


def _pairs(config: DecoderConfig, key: str, size: int) -> RowOrder | None:
    """Return the order of queries and keys, and of the norms over them."""
    size = 0 if size == config.head_size else size
    units = {"qkv.q": config.num_heads, "qkv.k": config.num_kv_heads}
    if config.qk_norm == "head":
        units |= {"q_norm": 1, "k_norm": 1}
    elif config.qk_norm:
        units |= {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
    return RowOrder("interleaved_pairs", units[key], size) if key in units else None


def _cut(config: DecoderConfig, part: str, shard: str, *, by_head: bool) -> RowSlice:
    """Return which rows of a fused matrix a shard is."""
    if config.output_gate:
        size = config.head_size
        return (
            RowSlice(size, 2 * size, 2 * size, config.num_heads)
            if part == "gate"
            else RowSlice(0, size, 2 * size, config.num_heads)
        )
    if part == "gate_up":
        size = config.intermediate_size
        return RowSlice(0, size, 2 * size) if shard == "gate" else RowSlice(size, 2 * size, 2 * size)
    groups = config.num_kv_heads if by_head else 1
    rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    sizes = {name: heads * config.head_size // groups for name, heads in rows.items()}
    start = sum(sizes[name] for name in "qkv"[: "qkv".index(shard)])
    return RowSlice(start, start + sizes[shard], sum(sizes.values()), groups)


def also(found: WeightMap, *names: tuple[str, str]) -> WeightMap:
    """Return the map with more rules, for checkpoints that call things otherwise: of each pair, what sources say and
    what they may say instead. All of them are replaced at once.
    """
    rules = [(rule, rule.source) for rule in found.rules]
    for old, new in names:
        rules = [(rule, source.replace(old, new)) for rule, source in rules]
    more = tuple(replace(rule, source=source) for rule, source in rules if source != rule.source)
    return replace(found, rules=found.rules + more)
