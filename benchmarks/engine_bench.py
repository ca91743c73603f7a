"""Offline engine benchmark on one GPU: the same token work for every engine, dummy weights.

One process measures one engine on one model, and prints one JSON line per workload.
    python engine_bench.py --engine vllm --model qwen3-8b
Model folders are written on the fly: a config.json, no weights, no tokenizer.
"""
import argparse, json, os, random, sys, tempfile, time

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, hidden_act="silu",
             max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, attention_bias=False,
             head_dim=128, num_key_value_heads=8, torch_dtype="bfloat16", bos_token_id=151643, eos_token_id=151645,
             initializer_range=0.02, use_cache=True)
CONFIGS = {
    "qwen3-0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                      "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
                      "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
                      "output_router_logits": False, "tie_word_embeddings": False},
    "llama-3.1-8b": dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_act="silu",
                         hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
                         rope_theta=500000.0, rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                            "high_freq_factor": 4.0,
                                                            "original_max_position_embeddings": 8192},
                         attention_bias=False, mlp_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
                         bos_token_id=128000, eos_token_id=128001, use_cache=True),
    "deepseek-v2-lite": dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", vocab_size=102400,
                             hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
                             num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
                             n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6, routed_scaling_factor=1.0,
                             kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, v_head_dim=128,
                             qk_nope_head_dim=128, topk_method="greedy", n_group=1, topk_group=1, moe_layer_freq=1,
                             first_k_dense_replace=1, norm_topk_prob=False, scoring_func="softmax", seq_aux=True,
                             aux_loss_alpha=0.001, hidden_act="silu", max_position_embeddings=163840,
                             rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False,
                             rope_scaling={"rope_type": "yarn", "type": "yarn", "beta_fast": 32, "beta_slow": 1,
                                           "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                                           "original_max_position_embeddings": 4096},
                             torch_dtype="bfloat16", bos_token_id=100000, eos_token_id=100001),
}


def workloads(vocab: int):
    """name -> (list of (prompt ids, new tokens)); the same for every engine."""
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(1000, vocab - 2000) for _ in range(n)]
    return {
        "ttft_128": [(ids(128), 1)],
        "single_128_257": [(ids(128), 257)],
        "prefill_32x2048": [(ids(2048), 1) for _ in range(32)],
        "decode_64x512_128": [(ids(512), 129) for _ in range(64)],
        "decode_256x512_128": [(ids(512), 129) for _ in range(256)],
        "mixed_512": [(ids(rng.randint(64, 1024)), rng.randint(32, 256)) for _ in range(512)],
    }


class Vllm:
    def __init__(self, path, quantization):
        import vllm
        self.version, self.params = vllm.__version__, vllm.SamplingParams
        self.llm = vllm.LLM(model=path, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
                            gpu_memory_utilization=0.8, enable_prefix_caching=False, max_num_seqs=256,
                            quantization=quantization, disable_log_stats=True, moe_backend="triton")

    def run(self, work):
        prompts = [{"prompt_token_ids": p} for p, _ in work]
        params = [self.params(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for _, n in work]
        out = self.llm.generate(prompts, params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in out)


class Jackfield:
    def __init__(self, path, quantization):
        import jackfield
        self.version, self.params = jackfield.__version__, jackfield.SamplingParams
        online = {"quantization": quantization} if quantization else {}
        self.llm = jackfield.LLM(path, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
                                 gpu_memory_utilization=0.8, enable_prefix_caching=False, max_num_seqs=256, **online)
        print(self.llm.report.summary(), file=sys.stderr)

    def run(self, work):
        prompts = [{"prompt_token_ids": p} for p, _ in work]
        params = [self.params(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for _, n in work]
        out = self.llm.generate(prompts, params)
        return sum(len(o.outputs[0].token_ids) for o in out)


ENGINES = {"vllm": Vllm, "jackfield": Jackfield}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--engine", choices=sorted(ENGINES), required=True)
    ap.add_argument("--model", choices=sorted(CONFIGS), required=True)
    ap.add_argument("--quantization")
    ap.add_argument("--only", nargs="*")
    ap.add_argument("--repeat", type=int, default=3)
    a = ap.parse_args()
    cfg = CONFIGS[a.model]
    path = tempfile.mkdtemp()
    json.dump(cfg, open(os.path.join(path, "config.json"), "w"))
    t = time.perf_counter()
    eng = ENGINES[a.engine](path, a.quantization)
    base = dict(engine=a.engine, version=eng.version, model=a.model, quantization=a.quantization)
    print(json.dumps({**base, "work": "startup", "s": round(time.perf_counter() - t, 1)}), flush=True)
    eng.run(workloads(cfg["vocab_size"])["decode_64x512_128"][:8])
    for name, work in workloads(cfg["vocab_size"]).items():
        if a.only and name not in a.only:
            continue
        times = []
        for _ in range(a.repeat):
            t = time.perf_counter()
            n = eng.run(work)
            times.append(time.perf_counter() - t)
        want = sum(m for _, m in work)
        s = sorted(times)[len(times) // 2]
        print(json.dumps({**base, "work": name, "median_s": round(s, 4), "min_s": round(min(times), 4),
                          "prompt_tokens": sum(len(p) for p, _ in work), "new_tokens": n, "complete": n == want,
                          "new_tok_per_s": round(n / s, 1),
                          "total_tok_per_s": round((n + sum(len(p) for p, _ in work)) / s, 1)}), flush=True)


if __name__ == "__main__":
    main()
