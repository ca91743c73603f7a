"""Names of scales of keys and values, and the layers they belong to."""

from __future__ import annotations

import pytest

from jackfield.checkpoint import find_cache_scales
from jackfield.errors import CheckpointError
from jackfield.interfaces import CacheScheme, WeightMap, WeightRule
from jackfield_quantization.stored_method import StoredMethod

SCHEME = StoredMethod.cache_scheme(None)
PARTS = ("q", "k", "v")
QKV = [(i, part) for i in (0, 1, 10) for part in PARTS]
RULES = [WeightRule(f"model.layers.{i}.self_attn.{part}_proj", f"layers.{i}.qkv", part) for i, part in QKV]
WEIGHTS = WeightMap((*RULES, WeightRule("model.embed_tokens", "embed")), droppable="model.")


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale", "self_attn.kv_scale"),
        ("attn.kv_scale", "attn.kv_scale"),
    ],
)
@pytest.mark.parametrize("start", ["model.", ""])
def test_where_tools_put_them(k: str, v: str, start: str) -> None:
    names = [f"{start}layers.{layer}.{name}" for layer in (10, 1) for name in dict.fromkeys((k, v))]
    found = find_cache_scales(SCHEME, [*names, "model.layers.1.self_attn.k_proj.weight"], WEIGHTS)
    assert found.layers == {n: {"k": f"{start}layers.{n}.{k}", "v": f"{start}layers.{n}.{v}"} for n in (10, 1)}
    assert found.idle == () and found.used == names
    rules = {(rule.source, rule.target, rule.suffix) for rule in found.rules()}
    assert (f"{start}layers.10.{v}", "layers.10.cache_scales", "v_scale") in rules and len(rules) == 4


def test_what_has_no_use_is_listed() -> None:
    names = ["model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.prob_scale", "visual.blocks.3.attn.k_scale"]
    found = find_cache_scales(SCHEME, [*names, "model.layers.0.self_attn.v_scale"], WEIGHTS)
    assert found.idle == tuple(names) and found.layers == {0: {"v": "model.layers.0.self_attn.v_scale"}}


def test_nothing_is_found_where_nothing_is_there() -> None:
    assert not find_cache_scales(None, ["model.layers.0.self_attn.k_scale"], WEIGHTS).layers
    names = ["model.layers.0.self_attn.k_scales", "model.layers.0.mlp.down_proj.output_scale", "ok_scale"]
    found = find_cache_scales(SCHEME, names, WEIGHTS)
    assert not found.layers and not found.idle


def test_two_for_one_are_an_error() -> None:
    names = ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.kv_scale"]
    with pytest.raises(CheckpointError, match="two tensors scale 'k' of layer 0"):
        find_cache_scales(SCHEME, names, WEIGHTS)


def test_roles() -> None:
    scheme = CacheScheme("", {"k": "k_scale"}, {"k_proj.output_scale": "k"})
    assert scheme.role("a.k_scale") == scheme.role("a.k_proj.output_scale") == "k"
    assert scheme.role("a.v_proj.output_scale") == scheme.role("k_scale") == ""
    assert scheme.is_scale("a.k_scale") and not scheme.is_scale("a.k_scales")
