"""Base of decoders whose MLPs are experts, and those that are Llama or Qwen with experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader, MoEConfig
from jackfield_models.decoder import Layers, expect
from jackfield_models.llama import Llama, Qwen2
from jackfield_models.moe_parts import NUMBERED, Sparse, expert_names, first_int
from jackfield_models.names import LLAMA, Names


class SparseDecoder(Llama):
    """Base: a Llama that says in ``sparse`` what its experts are."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    gguf_architectures = frozenset()
    names: ClassVar[Names] = replace(LLAMA, experts=expert_names())

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        hf.ignore("router_jitter_noise", "input_jitter_noise")  # noise is for training
        return {**super().details(hf, values), "sparse": cls.sparse(hf, values)}

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """Return the experts; ``values`` is what was read so far."""
        raise NotImplementedError

    @classmethod
    def block(cls, hf: ConfigReader, values: Mapping[str, Any], inner: int, **others: Any) -> MoEConfig:
        """Return a block of experts of that inner size; ``others`` are more of its fields."""
        found = {
            "num_experts": 0,
            "hidden_size": values["hidden_size"],
            "intermediate_size": inner,
            "activation": values["activation"],
        }
        if "top_k" not in others:
            found["top_k"] = first_int(hf, "num_experts_per_tok")
        return MoEConfig(**{**found, **others})


def every_layer(values: Mapping[str, Any]) -> frozenset[int]:
    """Return all layers."""
    return frozenset(range(values["num_layers"]))


class Mixtral(SparseDecoder):
    """``MixtralForCausalLM``: Mistral with experts."""

    name = "MixtralForCausalLM"
    summary = "Mixtral 8x7B and 8x22B"
    kinds: ClassVar[frozenset[str]] = frozenset({"MixtralForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA,
        experts=expert_names(
            router=("block_sparse_moe.gate", "mlp.gate"),
            each={key: (f"block_sparse_moe.experts.{{}}.{name}",) for key, name in NUMBERED.items()},
        ),
    )
    eps = ("rms_norm_eps", 1e-5)
    theta = 1000000.0
    qkv_bias: ClassVar[bool | None] = False

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return the one window for all layers."""
        return (hf.get("sliding_window"),) * layers

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        count = first_int(hf, "num_local_experts", "num_experts")
        experts = cls.block(hf, values, values["intermediate_size"], num_experts=count)
        return Sparse(experts=experts, layers=every_layer(values))


class PhiMoe(Mixtral):
    """``PhimoeForCausalLM``: SparseMixer routing, layer norms, biases."""

    name = "PhimoeForCausalLM"
    summary = "Phi-3.5-MoE and Phi-mini-MoE"
    kinds = frozenset({"PhimoeForCausalLM", "PhiMoEForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA,
        experts=expert_names(
            router=("block_sparse_moe.gate", "block_sparse_moe.router", "mlp.router"),
            each={key: (f"block_sparse_moe.experts.{{}}.{name}",) for key, name in NUMBERED.items()},
        ),
    )
    qkv_bias: ClassVar[bool | None] = None

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        return {
            **super().details(hf, values),
            "norm_kind": "layer",
            "head_bias": bool(hf.get("lm_head_bias", False)),
        }

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        found = super().sparse(hf, values)
        jitter = float(hf.get("router_jitter_noise", 0.01))
        return replace(found, experts=replace(found.experts, scoring="sparsemixer", jitter=jitter))


class Qwen2Moe(SparseDecoder, Qwen2):
    """``Qwen2MoeForCausalLM``: some layers have an MLP; beside the experts there is a gated one for every token."""

    name = "Qwen2MoeForCausalLM"
    summary = "Qwen 1.5 MoE and Qwen 2 57B"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen2MoeForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA, experts=expert_names(beside="shared_expert", shared_gate="mlp.shared_expert_gate")
    )

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        return {**super().details(hf, values), "qkv_bias": bool(hf.get("qkv_bias", True))}

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        shared = hf.get("shared_expert_intermediate_size", 0)
        return replace(qwen_experts(cls, hf, values), shared_size=shared, shared_gate=bool(shared))


class DeepseekV1(SparseDecoder):
    """``DeepseekForCausalLM``: Llama with many small experts, and some for every token (arXiv:2401.06066)."""

    name = "DeepseekForCausalLM"
    summary = "DeepSeek MoE 16B"
    kinds: ClassVar[frozenset[str]] = frozenset({"DeepseekForCausalLM"})

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        expect(hf, scoring_func="softmax")
        inner, first, step = (
            first_int(hf, "moe_intermediate_size"),
            hf.get("first_k_dense_replace", 0),
            hf.get("moe_layer_freq", 1),
        )
        experts = cls.block(
            hf,
            values,
            inner,
            num_experts=first_int(hf, "n_routed_experts"),
            renormalize=bool(hf.get("norm_topk_prob", False)),
        )
        return Sparse(
            experts=experts,
            layers=frozenset(i for i in range(first, values["num_layers"]) if i % step == 0),
            shared_size=(hf.get("n_shared_experts") or 0) * inner,
        )


class Qwen3Moe(SparseDecoder):
    """``Qwen3MoeForCausalLM``: Qwen 3 with experts in all or some layers."""

    name = "Qwen3MoeForCausalLM"
    summary = "Qwen 3 30B-A3B, 235B-A22B and Qwen3-Coder"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3MoeForCausalLM"})
    qk_norm = "head"

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return the one window for all layers, where there is one."""
        hf.ignore("max_window_layers")
        window = hf.get("sliding_window")
        return (window if hf.get("use_sliding_window", False) else None,) * layers

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        return qwen_experts(cls, hf, values)


class Olmoe(SparseDecoder):
    """``OlmoeForCausalLM``: norms over all queries and all keys."""

    name = "OlmoeForCausalLM"
    summary = "OLMoE 1B-7B"
    kinds: ClassVar[frozenset[str]] = frozenset({"OlmoeForCausalLM"})
    eps = ("rms_norm_eps", 1e-5)
    qk_norm = "projection"

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama. Values that are clipped behind the norms are not what the decoder does."""
        expect(hf, clip_qkv=None)
        return super().details(hf, values)

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        experts = cls.block(
            hf,
            values,
            values["intermediate_size"],
            num_experts=first_int(hf, "num_experts", "num_local_experts"),
            renormalize=bool(hf.get("norm_topk_prob", False)),
        )
        return Sparse(experts=experts, layers=every_layer(values))


def qwen_experts(cls: type[SparseDecoder], hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
    """Return the experts that Qwen's keys describe."""
    count, step = first_int(hf, "num_experts", "num_local_experts"), hf.get("decoder_sparse_step", 1)
    plain: Iterable[int] = hf.get("mlp_only_layers", [])
    layers = {layer for layer in range(values["num_layers"]) if (layer + 1) % step == 0} - set(plain)
    experts = cls.block(
        hf,
        values,
        first_int(hf, "moe_intermediate_size"),
        num_experts=count,
        renormalize=bool(hf.get("norm_topk_prob", False)),
    )
    return Sparse(experts=experts, layers=frozenset(layers if count else ()))
