"""Checkpoints with scales for a cache of 8-bit floats, from their tensors to log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import Tiny, continuation_logits, make_tiny, random_prompts
from quantized_models import quantized, same, save
from quantized_writers import FORMATS
from safetensors.torch import load_file
from transformers import AttentionInterface, LlamaForCausalLM

from jackfield import LLM, SamplingParams
from jackfield.engine.save_state import save_sharded_state
from jackfield.errors import JackfieldError

PROMPT = random_prompts((40,), seed=4)[0]
LAYERS = 3
SCALES = [(0.0137 * (i + 1), 0.0071 * (i + 2)) for i in range(LAYERS)]
"""Of keys and values, layer by layer; no powers of two, with which floats of 8 bits would round alike."""

EDGE = 5e-3
"""What it costs where a number is so near the edge between two narrow ones that engine and reference, which differ in
their last bits, round it to different sides.
"""


def meaning(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.fixture
def reference(tmp_path: Path) -> Iterator[Any]:
    """Return the plain model with keys and values rounded as the cache is to round them."""

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **_: Any) -> Any:
        k_scale, v_scale = current[module.layer_idx]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (meaning(k, k_scale), meaning(v, v_scale)))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scaling)
        return mixed.transpose(1, 2), None

    current: list[tuple[float, float]] = []
    AttentionInterface.register("narrow", attend)

    def make(folder: Path, scales: list[tuple[float, float]]) -> Tiny:
        current[:] = scales
        model = LlamaForCausalLM.from_pretrained(folder).float().eval()
        model.set_attn_implementation("narrow")
        return Tiny(folder, model)

    yield make
    AttentionInterface._global_mapping.pop("narrow", None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"), "llama").folder


def with_scales(
    folder: Path, names: tuple[str, str], scales: list[tuple[float, float]] = SCALES, **config: Any
) -> tuple[Path, Path]:
    """Return a quantized checkpoint with scales, and the plain one that its weights stand for."""
    source, kind = folder.parent, FORMATS["fp8-static"]
    packed, plain = quantized(source, folder, kind.write, kind.config)
    values = json.loads((packed / "config.json").read_text())
    values["quantization_config"] |= config
    tensors = load_file(packed / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(names, pair, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor(scale)
    return save(folder / "scaled", tensors, values), plain


def error(llm: LLM, tiny: Tiny) -> float:
    """Return the largest difference of a log probability from the reference's, at any place of a prompt."""
    (request,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=-1))
    expected = continuation_logits(tiny.model, PROMPT[:1], PROMPT[1:]).log_softmax(dim=-1)
    assert request.prompt_logprobs is not None
    found = [
        [entry[token].logprob for token in range(expected.shape[1])] for entry in request.prompt_logprobs[1:] if entry
    ]
    return float((torch.tensor(found) - expected).abs().max())


NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
]


@pytest.mark.parametrize("names", NAMES, ids=[k for k, _ in NAMES])
def test_each_layer_has_its_scales(
    engine: Engine, source: Path, tmp_path: Path, reference: Any, names: tuple[str, str]
) -> None:
    packed, plain = with_scales(linked(source, tmp_path), names)
    llm = engine(packed, cache_dtype="fp8", long_prefill_token_threshold=7, block_size=8)
    assert error(llm, reference(plain, SCALES)) < EDGE
    assert error(llm, reference(plain, [(1.0, 1.0)] * LAYERS)) > 4 * EDGE
    assert error(llm, reference(plain, SCALES[::-1])) > 4 * EDGE
    assert any("6 scales of the checkpoint's cache" in note and "are applied" in note for note in llm.report.notes)


def linked(source: Path, tmp_path: Path) -> Path:
    """Return a folder beside a copy of the model's files."""
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path / "made"


def test_one_scale_for_both(engine: Engine, source: Path, tmp_path: Path, reference: Any) -> None:
    both = [(0.011 * (i + 1),) * 2 for i in range(LAYERS)]
    packed, plain = with_scales(linked(source, tmp_path), ("self_attn.kv_scale",) * 2, both)
    assert error(engine(packed, cache_dtype="fp8"), reference(plain, both)) < EDGE


def test_layers_without_scales_have_one(engine: Engine, source: Path, tmp_path: Path, reference: Any) -> None:
    packed, plain = with_scales(linked(source, tmp_path), NAMES[0], SCALES[:1])
    wanted = [SCALES[0], *[(1.0, 1.0)] * (LAYERS - 1)]
    llm = engine(packed, cache_dtype="fp8")
    assert error(llm, reference(plain, wanted)) < EDGE
    assert error(llm, reference(plain, SCALES)) > 4 * EDGE


def test_caches_in_other_types_do_not_use_them(engine: Engine, source: Path, tmp_path: Path) -> None:
    """Wide ones need none, and those of whole numbers scale token by token: the report says so."""
    packed, plain = with_scales(linked(source, tmp_path), NAMES[0])
    for kind in ("auto", "int8"):
        llm = engine(packed, cache_dtype=kind, max_model_len=128)
        assert any(
            "6 scales of a quantized cache" in n and "set cache.cache_dtype to fp8" in n for n in llm.report.notes
        )
        same(llm, engine(plain, cache_dtype=kind, max_model_len=128))


def test_some_layers_in_8_bit_floats(engine: Engine, source: Path, tmp_path: Path) -> None:
    packed, _ = with_scales(linked(source, tmp_path), NAMES[0])
    llm = engine(packed, cache_dtype="auto", **{"cache.layer_dtypes": {"1": "fp8"}})
    notes = " ".join(llm.report.notes)
    assert "2 scales of the checkpoint's cache (model.layers.1" in notes and "4 scales of a quantized cache" in notes


def test_scales_of_queries_have_no_use(engine: Engine, source: Path, tmp_path: Path) -> None:
    packed, _ = with_scales(linked(source, tmp_path), ("self_attn.q_scale", "self_attn.prob_scale"))
    llm = engine(packed, cache_dtype="fp8")
    assert any("6 scales of the checkpoint" in note and "have no use" in note for note in llm.report.notes)


def test_saved_as_ranks_hold_it(engine: Engine, source: Path, tmp_path: Path) -> None:
    """The state has the scales, whatever the cache was when it was saved."""
    packed, _ = with_scales(linked(source, tmp_path), NAMES[1])
    folder = save_sharded_state(str(packed), tmp_path / "state")
    for kind in ("fp8", "auto"):
        same(engine(folder, cache_dtype=kind, max_model_len=128), engine(packed, cache_dtype=kind, max_model_len=128))


@pytest.mark.parametrize(
    ("scale", "match"), [(torch.tensor(0.0), "not above 0"), (torch.ones(3), "does not fit"), (None, "used by nothing")]
)
def test_scales_that_mean_nothing(
    engine: Engine, source: Path, tmp_path: Path, scale: torch.Tensor | None, match: str
) -> None:
    packed, _ = with_scales(linked(source, tmp_path), NAMES[0])
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.self_attn.k_scale" + ("" if scale is not None else "s")
    tensors[name] = torch.tensor(0.02) if scale is None else scale
    values = json.loads((packed / "config.json").read_text())
    with pytest.raises(JackfieldError, match=match):
        engine(save(tmp_path / "wrong", tensors, values), cache_dtype="fp8")


@pytest.mark.parametrize(
    ("kind", "names", "keys"),
    [
        ("ct-fp8-channel", NAMES[0], {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}),
        ("modelopt-fp8", NAMES[1], {"kv_cache_quant_algo": "FP8"}),
        ("gptq-4", NAMES[2], {}),
    ],
)
def test_other_formats(
    engine: Engine,
    source: Path,
    tmp_path: Path,
    reference: Any,
    kind: str,
    names: tuple[str, str],
    keys: dict[str, Any],
) -> None:
    form = FORMATS[kind]
    packed, plain = quantized(source, tmp_path / "a", form.write, {**form.config, **keys})
    tensors = load_file(packed / "model.safetensors")
    for layer, pair in enumerate(SCALES):
        tensors |= {f"model.layers.{layer}.{n}": torch.tensor([s]) for n, s in zip(names, pair, strict=True)}
    folder = save(tmp_path / "b", tensors, json.loads((packed / "config.json").read_text()))
    assert error(engine(folder, cache_dtype="fp8"), reference(plain, SCALES)) < EDGE
