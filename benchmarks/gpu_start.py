"""From command to first answer with real weights on disk, and what the first request of each batch size waits for.

    python benchmarks/gpu_start.py --model qwen3-8b [--folder DIR]

Writes safetensors of random numbers in the checkpoint's layout, then starts engines in processes of their own: the
first finds no compiled kernels, the others do. Files come from the page cache, since they were written just before.
Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 256)
SHARD_BYTES = 4 << 30


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a Qwen3 checkpoint."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, q),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def write_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """Write config and shards; returns bytes."""
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    total = size = number = 0

    def flush() -> None:
        nonlocal weights, size, number
        name = f"model-{number:05d}.safetensors"
        save_file(weights, folder / name)
        places.update(dict.fromkeys(weights, name))
        weights, size, number = {}, 0, number + 1

    for name, shape in tensor_shapes(config).items():
        weights[name] = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()
        size += weights[name].nbytes
        total += weights[name].nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def start(folder: str, began: float) -> None:
    """Start an engine and time its first answers; the entry of the processes that are measured."""
    from jackfield import LLM, SamplingParams

    imported = time.time() - began
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False)
    ready = time.time() - began
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    answers: dict[str, list[float]] = {}
    for batch in BATCHES:
        prompts = [{"prompt_token_ids": [7 + i] * 32} for i in range(batch)]
        for _ in range(3):
            asked = time.perf_counter()
            llm.generate(prompts, params)
            answers.setdefault(str(batch), []).append(round((time.perf_counter() - asked) * 1e3, 2))
    first = round(ready + answers["1"][0] / 1e3, 2)
    times = {"import_s": round(imported, 2), "ready_s": round(ready, 2), "first_answer_s": first}
    print(json.dumps({"chosen": llm.report.summary(), **times, "ms_by_batch": answers}), flush=True)


def main() -> None:
    """Write, then start three times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--start", nargs=2)
    arguments = parser.parse_args()
    if arguments.start:
        start(arguments.start[0], float(arguments.start[1]))
        return
    from engine_bench import CONFIGS

    folder = arguments.folder or Path(tempfile.mkdtemp())
    began = time.perf_counter()
    written = write_checkpoint(folder, CONFIGS[arguments.model])
    print(json.dumps({"model": arguments.model, "bytes": written, "written_s": round(time.perf_counter() - began, 1)}))
    cache = tempfile.mkdtemp()
    for run in ("kernels compiled", "kernels cached", "kernels cached"):
        command = [sys.executable, __file__, "--start", str(folder), str(time.time())]
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        print(json.dumps({"run": run} | json.loads(lines[-1])) if lines else done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
