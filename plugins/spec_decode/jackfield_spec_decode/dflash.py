"""DFlash: layers that read the target's states as context and fill a block of masks. Configuration and weight map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    AttentionGroup,
    BuildContext,
    ConfigReader,
    ModelArchitecture,
    TextConfig,
    WeightMap,
    WeightRule,
)
from jackfield_spec_decode.eagle import decoder_keys, full_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

LAYER = {
    "q.q": "self_attn.q_proj",
    "kv.k": "self_attn.k_proj",
    "kv.v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "gate_up.gate": "mlp.gate_proj",
    "gate_up.up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}
"""Checkpoint modules of a layer, by target and shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(TextConfig):
    """What the layers need.

    Args:
        num_heads, num_kv_heads, head_size, intermediate_size, norm_eps, bias, mlp_bias, theta, scaling: as of any
            decoder.
        taps: layers of the target whose states are the context. target_layers: of the target; 0: not said.
        mask_token: fills a block. block_size: tokens of a block, the last known one among them.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    norm_eps: float
    theta: float
    scaling: Mapping[str, Any] | None
    bias: bool = False
    mlp_bias: bool = False
    taps: tuple[int, ...]
    target_layers: int
    mask_token: int
    block_size: int


class DFlashModel(ModelArchitecture):
    """``DFlashDraftModel`` (arXiv:2602.06036): a few layers like those of Qwen 3, whose queries are a block of one
    known token and masks. Keys and values are made of the block and, with the same weights, of the context: states of
    some of the target's layers, fused by ``fc`` and normalized by ``hidden_norm``, the same for all layers.

    Embedding and head are the target's. ``dflash_config`` of the config, or the config itself, has ``mask_token_id``,
    ``target_layer_ids`` (0 is the first layer) and ``block_size``.
    """

    name = "DFlashDraftModel"
    summary = "DFlash layers: a block of masks beside the target's states"
    kinds: ClassVar[frozenset[str]] = frozenset({"DFlashDraftModel"})
    tasks: ClassVar[frozenset[str]] = frozenset({"draft"})

    @classmethod
    def config(cls, hf: ConfigReader) -> DFlashConfig:
        """See ModelArchitecture.

        Raises:
            CheckpointError: layers have windows or see no later part of their block, or the mask is no token.
        """
        _refuse_windows(hf)
        common, own = decoder_keys(hf), hf.section("dflash_config")
        said = {
            name: hf.get(name) if own is None else own.get(name, hf.get(name))
            for name in ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")
        }
        for name in ("mask_token_id", "target_layer_ids"):
            if said[name] is None:
                raise CheckpointError(
                    "a DFlash checkpoint says which token is its mask and which layers it reads",
                    field=f"dflash_config.{name}",
                    value=None,
                    remedy="use a checkpoint that was saved with its whole config",
                )
        if not 0 <= said["mask_token_id"] < common["vocab_size"]:
            raise CheckpointError(
                f"the mask is none of the {common['vocab_size']} tokens",
                field="dflash_config.mask_token_id",
                value=said["mask_token_id"],
            )
        hf.ignore("max_window_layers", "sliding_window")
        return DFlashConfig(
            **common,
            taps=tuple(said["target_layer_ids"]),
            target_layers=said["num_target_layers"] or 0,
            mask_token=said["mask_token_id"],
            block_size=said["block_size"] or 16,
        )

    @classmethod
    def attention_groups(cls, config: DFlashConfig) -> tuple[AttentionGroup, ...]:
        """See ModelArchitecture."""
        return (full_group(config),)

    @classmethod
    def weight_map(cls, config: DFlashConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        rules = [WeightRule(name, name) for name in ("fc", "hidden_norm", "norm")]
        for index in range(config.num_layers):
            for key, below in LAYER.items():
                part, _, shard = key.partition(".")
                rules.append(WeightRule(f"layers.{index}.{below}", f"layers.{index}.{part}", shard))
        return WeightMap(tuple(rules), (r".*\.?rotary_emb\.inv_freq",))

    @classmethod
    def build(cls, config: DFlashConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_spec_decode.dflash_model import DFlashModule

        return DFlashModule(config, cls.attention_groups(config)[0], ctx)


def _refuse_windows(hf: ConfigReader) -> None:
    """Refuse layers whose queries see less than all context and their whole block.

    Raises:
        CheckpointError: there are some.
    """
    own, types = hf.section("dflash_config"), hf.get("layer_types") or ()
    found = {
        "layer_types": [kind for kind in types if kind != "full_attention"],
        # Without types of layers all of them have the window.
        "use_sliding_window": not types and hf.get("use_sliding_window"),
        "is_causal": hf.get("is_causal"),
        "dflash_config.use_swa": own is not None and own.get("use_swa"),
        "dflash_config.causal": own is not None and own.get("causal"),
    }
    hf.ignore("use_sliding_window")
    for field, value in found.items():
        if value:
            raise CheckpointError(
                "DFlash layers with windows or with causal blocks are not supported",
                field=field,
                value=value,
                remedy="use a checkpoint all of whose layers see everything",
            )
