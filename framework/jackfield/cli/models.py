"""``jackfield models``, and docs/models.md, which is made from the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags

_COLUMNS = ("architecture", "how", "tasks", "gguf", "distribution", "summary")
NATIVE = "native"
"""The architecture is written for this engine."""
FALLBACK = "fallback"
"""The architecture runs by a plugin that serves any."""
NOT = "not"
"""The architecture does not run."""
_EVERYTHING = "*"
"""Stands for all architectures that no plugin names."""

_NOTES = """
`architecture` is what a model's config.json says in `architectures`; `GGUF` is what a GGUF file says in
`general.architecture`. `jackfield models` lists the same for what is installed, plugins of others included. A model
whose configuration has a key that nothing reads, or a value that the architecture does not do, is refused: nothing is
computed in another way than the configuration asks for.

## Everything else: the fallback

An architecture that is not listed runs by transformers' own modules, with this engine's attention and paged cache, its
linear layers (tensor parallelism and quantization included), embedding and head. `jackfield models NAME` says for an
architecture or a model whether it is `native`, runs by the `fallback`, or does `not` run, and why; `jackfield explain
MODEL` shows the same with everything else that was chosen. `implementation: transformers` uses the fallback for a
listed architecture too.

It costs speed: projections and norms are not fused, and on devices with graphs no step is recorded. Experts are
computed by transformers' code, and every device of a tensor-parallel group holds all of them.

What it does is found out, not guessed: the model's code is run once without data, and its calls of attention and its
masks are watched. It needs a safetensors checkpoint of a class that transformers itself has (code that comes with a
checkpoint is not run), and is refused, with the reason, where layers mix tokens in another way than by softmax
attention over all tokens before or a window of them; where attention has sinks; where rotary embeddings change with
the longest sequence (`dynamic`, `longrope`); for encoders with decoders; and where a quantized checkpoint has weights
that transformers fuses at load (experts). Of models with images or sound it runs the text.

## What to know

- Sequences that are longer than a model was made for: `linear`, `ntk`, `dynamic`, `yarn`, `llama3`, `longrope` and
  `proportional` scaling are done as transformers does them, with one difference. Where frequencies depend on the length
  of a sequence (`dynamic`, `longrope`), the engine takes `max_model_len` for it: keys in the cache cannot be rotated
  anew when a sequence grows. For Phi 3 that means: up to the original length (4096) set `max_model_len` to it.
- Fourier position embeddings (`use_fope`, or any `fope_*` key of `rope_parameters`): the matrices `cos_coef` and
  `sin_coef` are read from `model.rotary_emb`, for all heads or for each cache head. Features whose wave completes no
  turn within `max_position_embeddings` (or is not among the first `num_inv_freq`) have cosine and sine 1, as in
  training; some engines give them sine 0.
- Dual-chunk attention (`dual_chunk_attention_config`, Qwen2.5-1M) needs an attention backend with the feature
  `dual_chunk` (`torch_sdpa`) where texts are longer than a chunk, `chunk_size - local_size` tokens; with
  `max_model_len` at that or less it is attention as usual, for any backend. Behind `original_max_position_embeddings`
  tokens, scores have YaRN's factor for as many tokens as the query sees, so that a token's numbers depend on nothing
  that comes later: prompts that share a beginning share its cache. Sparse prefill (`sparse_attention_config`) is done
  by no backend here and is refused where texts are longer than its threshold; with `sparse_attention_enabled: false`
  in `model.hf_overrides` every key is attended to.
- Linear biases (BLOOM, some Falcons) need an attention backend with the feature `alibi`: `torch_sdpa`.
- InternLM 2 and 3, EXAONE 3 and MiniCPM have no class in transformers; they are held against models of transformers
  that compute the same (Llama, Granite) with their tensors renamed and fused.
"""


def list_models(
    name: str | None = None,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """List the model architectures that run: how they are supported, what for, and what GGUF files call them. With a
    name, tell how that one runs; the exit code is 1 when it does not.

    Parameters
    ----------
    name
        An architecture (as config.json names it), or a model: a folder, a file, hf:ORG/NAME or pypi:NAME.
    json
        Print JSON.
    """
    from jackfield.cli.tables import print_json, print_table
    from jackfield.registry import Registry

    if name is not None:
        told = tell(name, engine.config())
        if json:
            print_json(told)
        else:
            print("\n".join(f"{key}: {value}" for key, value in told.items() if value))
        return int(told["how"] == NOT)
    rows = sorted(model_rows(Registry.discover(engine.config().plugins)), key=lambda row: str(row["architecture"]))
    if json:
        print_json(rows)
    else:
        print_table(_COLUMNS, [[_cell(row[column]) for column in _COLUMNS] for row in rows])
    return 0


def tell(name: str, config: Any) -> dict[str, Any]:
    """Return how an architecture or a model runs: ``architecture``, ``how``, ``plugin``, ``why`` and ``remedy``."""
    from jackfield.errors import NoCandidateError
    from jackfield.oracle.pipeline import choose_architecture
    from jackfield.registry import Registry

    facts = _facts(name, config)
    found = {"architecture": facts.architecture, "how": NOT, "plugin": "", "why": "", "remedy": ""}
    try:
        decision = choose_architecture(config, facts, Registry.discover(config.plugins))
    except NoCandidateError as error:
        return {**found, "why": error.message, "remedy": error.remedy}
    native = facts.architecture in decision.plugin.kinds
    return {**found, "how": NATIVE if native else FALLBACK, "plugin": decision.ref.name, "why": decision.why}


def _facts(name: str, config: Any) -> Any:
    from jackfield.checkpoint import read_facts
    from jackfield.interfaces import ModelFacts
    from jackfield.sources import resolve_model

    if ":" not in name.removeprefix("gguf:") and not Path(name).exists():
        return ModelFacts("", "gguf" if name.startswith("gguf:") else "config", name, {})
    folder = Path(config.model.download_dir) if config.model.download_dir else None
    return read_facts(resolve_model(name, folder), config.model.load_format, config.model.hf_overrides)


def model_rows(registry: Any) -> Iterator[dict[str, Any]]:
    """Return one row for each architecture that can be used. Loads the light classes, and no torch."""
    for ref in registry.refs("models"):
        architecture = ref.load()
        if architecture is None:
            continue
        anything = "*" in architecture.kinds
        yield {
            "architecture": _EVERYTHING if anything else ref.name,
            "how": FALLBACK if anything else NATIVE,
            "tasks": sorted(architecture.tasks),
            "gguf": sorted(architecture.gguf_architectures),
            "distribution": ref.distribution,
            "summary": architecture.summary,
        }


def render_models() -> str:
    """Return docs/models.md: the project's own architectures."""
    from jackfield.registry import Registry

    rows = [
        row for row in model_rows(Registry.discover()) if row["distribution"] == "jackfield" and row["how"] == NATIVE
    ]
    lines = ["# Models", "", "<!-- Made by `make docs-config`; do not edit. -->", ""]
    lines += [f"{len(rows)} architectures.", "", "| architecture | models | tasks | GGUF |", "|---|---|---|---|"]
    for row in rows:
        gguf = ", ".join(f"`{name}`" for name in row["gguf"])
        lines.append(f"| `{row['architecture']}` | {row['summary']} | {_cell(row['tasks'])} | {gguf} |")
    return "\n".join(lines) + "\n" + _NOTES


def _cell(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
