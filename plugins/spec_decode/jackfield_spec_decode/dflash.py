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
from jackfield_spec_decode.eagle_forms import LIBRARY, NOTES, refuse_windows

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
OTHERS = (
    *("sliding_window_non_causal", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf", "shift_label"),
)
"""What the speculators library writes about layers with windows, another head (Domino) and training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(TextConfig):
    """What the layers need.

    Args:
        num_heads, num_kv_heads, head_size, intermediate_size, norm_eps, bias, mlp_bias, theta, scaling: as of any
            decoder.
        taps: layers of the target whose states are the context. target_layers: of the target; 0: not said.
        mask_token: fills a block. block_size: tokens of a block, the last known one among them. draft_vocab: tokens
            that a head of its own knows; 0: the head is the target's.
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
    draft_vocab: int = 0


class DFlashModel(ModelArchitecture):
    """``DFlashDraftModel`` (arXiv:2602.06036): a few layers like those of Qwen 3, whose queries are a block of one
    known token and masks. Keys and values are made of the block and, with the same weights, of the context: states of
    some of the target's layers, fused by ``fc`` and normalized by ``hidden_norm``, the same for all layers.

    Embedding and head are the target's. ``dflash_config`` of the config, or the config itself, has ``mask_token_id``,
    ``target_layer_ids`` (0 is the first layer) and ``block_size``.

    Checkpoints of the speculators library have the layers' keys in a section of their own, name layers by the one that
    comes behind (``aux_hidden_state_layer_ids``), and may have a head over some tokens (``draft_vocab_size``, ``d2t``).
    """

    name = "DFlashDraftModel"
    summary = "DFlash layers: a block of masks beside the target's states"
    kinds: ClassVar[frozenset[str]] = frozenset({"DFlashDraftModel", "DFlashSpeculator"})
    tasks: ClassVar[frozenset[str]] = frozenset({"draft"})

    @classmethod
    def config(cls, hf: ConfigReader) -> DFlashConfig:
        """See ModelArchitecture.

        Raises:
            CheckpointError: layers have windows or see no later part of their block, or the mask is no token.
        """
        section = hf.section(LIBRARY)
        common = decoder_keys(hf if section is None else section)
        said = _authors(hf) if section is None else _librarys(hf, section, common)
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
        return DFlashConfig(
            **common,
            taps=tuple(said["target_layer_ids"]),
            target_layers=said["num_target_layers"] or 0,
            mask_token=said["mask_token_id"],
            block_size=said["block_size"] or 16,
            draft_vocab=said.get("draft_vocab", 0),
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
        if config.draft_vocab:
            rules += [WeightRule("lm_head", "head"), WeightRule("d2t", "d2t")]
        return WeightMap(
            tuple(rules), (r".*\.?rotary_emb\.inv_freq", r"embed_tokens\.weight|lm_head\.weight|[dt]2[dt]")
        )

    @classmethod
    def build(cls, config: DFlashConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_spec_decode.dflash_model import DFlashModule

        return DFlashModule(config, cls.attention_groups(config)[0], ctx)


def _authors(hf: ConfigReader) -> dict[str, Any]:
    """Return what a configuration says in the authors' form."""
    _refuse_windows(hf)
    own = hf.section("dflash_config")
    hf.ignore("max_window_layers", "sliding_window")
    names = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")
    return {name: hf.get(name) if own is None else own.get(name, hf.get(name)) for name in names}


def _librarys(hf: ConfigReader, section: ConfigReader, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of the speculators library's form, with the size of the vocabulary of a head of its own.

    Raises:
        CheckpointError: layers have windows, or something is computed that no layer here computes.
    """
    hf.ignore(*NOTES, *OTHERS)
    refuse_windows(section)
    width = common["hidden_size"]
    fit = {"projector_type": "dflash", "sample_from_anchor": False, "target_hidden_size": width}
    for key, wanted in fit.items():
        found = hf.get(key)
        if found not in (None, wanted):
            raise CheckpointError(
                f"DFlash checkpoints with another {key} than {wanted} are not supported",
                field=key,
                value=found,
                remedy="use another draft checkpoint",
            )
    behind, tokens = hf.get("aux_hidden_state_layer_ids"), hf.get("draft_vocab_size") or common["vocab_size"]
    return {
        "mask_token_id": hf.get("mask_token_id"),
        "target_layer_ids": None if behind is None else [layer - 1 for layer in behind],
        "block_size": hf.get("block_size") or 8,
        "num_target_layers": None,
        "draft_vocab": 0 if tokens == common["vocab_size"] else tokens,
    }


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
