"""A whole model of four-bit numbers: packed beside dense, in logits and in seconds.

``python benchmarks/gpu_packed_model.py MODEL [--plugins triton_gptq gptq] [--works single_128_257 ...]`` writes a GPTQ
checkpoint with the shapes of a model of ``engine_bench.py`` and random numbers, and runs it with each plugin. Prints
one JSON object for each start and workload, and at the end how far the plugins' log probabilities of first tokens are
apart. A folder that was written before is used again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_bench import CONFIGS, workloads
from jackfield import LLM, SamplingParams

GROUP, WORD = 128, 8
PROMPTS = (5, 17, 64, 128, 200, 511)
"""Lengths of prompts whose first tokens are compared."""
TOP = 20


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, outputs, inputs) of the matrices of a layer."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    for name, outputs, inputs in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", width, q)):
        yield f"self_attn.{name}_proj", outputs, inputs
    for name, outputs, inputs in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
        yield f"mlp.{name}_proj", outputs, inputs


def packed(outputs: int, inputs: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return one random matrix as GPTQ stores it, symmetric, of a deviation of about 0.02."""
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (inputs // WORD, outputs), device=device, dtype=torch.int64)
    scales = torch.rand((inputs // GROUP, outputs), device=device) * 0.004 + 0.002
    return {
        "qweight": words.to(torch.int32).cpu(),
        "qzeros": torch.full((inputs // GROUP, outputs // WORD), 0x77777777, dtype=torch.int32),
        "scales": scales.to(torch.float16).cpu(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def write(config: dict[str, Any], folder: Path, device: torch.device) -> None:
    """Write the checkpoint, a file for each layer and one for all else."""
    torch.manual_seed(0)
    width, size, index = config["hidden_size"], config["head_dim"], {}

    def norm(count: int) -> torch.Tensor:
        return (1 + torch.randn(count) * 0.02).bfloat16()

    def table() -> torch.Tensor:
        return (torch.randn(config["vocab_size"], width, device=device) * 0.02).bfloat16().cpu()

    def keep(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        index.update(dict.fromkeys(tensors, name))

    for layer in range(config["num_hidden_layers"]):
        start, tensors = f"model.layers.{layer}.", {}
        for name, outputs, inputs in matrices(config):
            parts = packed(outputs, inputs, device)
            tensors |= {f"{start}{name}.{suffix}": tensor for suffix, tensor in parts.items()}
        for name, count in (("input_layernorm", width), ("post_attention_layernorm", width)):
            tensors[f"{start}{name}.weight"] = norm(count)
        for name in ("q", "k"):
            tensors[f"{start}self_attn.{name}_norm.weight"] = norm(size)
        keep(f"layer-{layer}.safetensors", tensors)
    others = {"model.embed_tokens.weight": table(), "model.norm.weight": norm(width)}
    keep("rest.safetensors", others if config["tie_word_embeddings"] else others | {"lm_head.weight": table()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    stored = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))


def run(llm: LLM, work: list[tuple[list[int], int]], **options: Any) -> list[Any]:
    """Return outputs of greedy requests, each with its number of tokens."""
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=count, **options)
        for _, count in work
    ]
    return llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params)


def first_tokens(llm: LLM, work: list[tuple[list[int], int]]) -> list[dict[int, float]]:
    """Return log probabilities of the likeliest first tokens of some prompts."""
    prompts = [(ids[:length], 1) for (ids, _), length in zip(work, PROMPTS, strict=False)]
    outputs = run(llm, prompts, logprobs=TOP)
    return [{token: entry.logprob for token, entry in out.outputs[0].logprobs[0].items()} for out in outputs]


def main() -> None:
    """Write, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=[name for name, config in CONFIGS.items() if config["model_type"] == "qwen3"])
    parser.add_argument("--plugins", nargs="+", default=["triton_gptq", "gptq"])
    parser.add_argument("--works", nargs="*", default=["single_128_257", "decode_64x512_128", "decode_256x512_128"])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    config = {**CONFIGS[arguments.model]}
    config["num_hidden_layers"] = arguments.layers or config["num_hidden_layers"]
    folder = arguments.folder or Path(tempfile.mkdtemp())
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(config, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    works, found = workloads(config["vocab_size"]), []
    for plugin in arguments.plugins:
        began = time.perf_counter()
        limits = {"max_model_len": 4096, "max_num_seqs": 256, "enable_prefix_caching": False}
        llm = LLM(str(folder), skip_tokenizer_init=True, quantization={"force": plugin}, **limits)
        about = {"model": arguments.model, "layers": config["num_hidden_layers"], "plugin": plugin}
        print(json.dumps({**about, "start_s": round(time.perf_counter() - began, 1)}), flush=True)
        found.append(first_tokens(llm, works["decode_64x512_128"]))
        for name in arguments.works:
            times = []
            for _ in range(arguments.repeat):
                began = time.perf_counter()
                run(llm, works[name])
                times.append(round(time.perf_counter() - began, 4))
            print(json.dumps({**about, "work": name, "min_s": min(times), "s": times}), flush=True)
        llm.shutdown()
    for plugin, other in zip(arguments.plugins[1:], found[1:], strict=True):
        pairs = list(zip(found[0], other, strict=True))
        apart = [max(abs(one[token] - two[token]) for token in one.keys() & two.keys()) for one, two in pairs]
        same = sum(max(one, key=one.__getitem__) == max(two, key=two.__getitem__) for one, two in pairs)
        spread = [round(max(two.values()) - min(two.values()), 3) for _, two in pairs]
        figures = {"apart": [round(value, 4) for value in apart], "same_first": same, "of": len(pairs)}
        print(json.dumps({"plugins": [arguments.plugins[0], plugin], **figures, "spread": spread}))


if __name__ == "__main__":
    main()
