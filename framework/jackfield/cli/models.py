"""``jackfield models``, and docs/models.md, which is made from the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from jackfield.cli.flags import EngineFlags

_COLUMNS = ("architecture", "how", "tasks", "gguf", "distribution", "summary")
NATIVE = "native"
"""The architecture is written for this engine."""

_NOTES = """
`architecture` is what a model's config.json says in `architectures`; `GGUF` is what a GGUF file says in
`general.architecture`. `jackfield models` lists the same for what is installed, plugins of others included. A model
whose architecture is not listed is refused, and so is one whose configuration has a key that nothing reads, or a value
that the architecture does not do: nothing is computed in another way than the configuration asks for.

## What to know

- Sequences that are longer than a model was made for: `linear`, `ntk`, `dynamic`, `yarn`, `llama3`, `longrope` and
  `proportional` scaling are done as transformers does them, with one difference. Where frequencies depend on the length
  of a sequence (`dynamic`, `longrope`), the engine takes `max_model_len` for it: keys in the cache cannot be rotated
  anew when a sequence grows. For Phi 3 that means: up to the original length (4096) set `max_model_len` to it.
- Linear biases (BLOOM, some Falcons) need an attention backend with the feature `alibi`: `torch_sdpa`.
- InternLM 2 and 3, EXAONE 3 and MiniCPM have no class in transformers; they are held against models of transformers
  that compute the same (Llama, Granite) with their tensors renamed and fused.
"""


def list_models(
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    engine: Annotated[EngineFlags, Parameter(parse=False)],
) -> int:
    """List the model architectures that run: how they are supported, what for, and what GGUF files call them.

    Parameters
    ----------
    json
        Print JSON.
    """
    from jackfield.cli.tables import print_json, print_table
    from jackfield.registry import Registry

    rows = list(model_rows(Registry.discover(engine.config().plugins)))
    if json:
        print_json(rows)
    else:
        print_table(_COLUMNS, [[_cell(row[column]) for column in _COLUMNS] for row in rows])
    return 0


def model_rows(registry: Any) -> Iterator[dict[str, Any]]:
    """Return one row for each architecture that can be used. Loads the light classes, and no torch."""
    for ref in registry.refs("models"):
        architecture = ref.load()
        if architecture is None:
            continue
        yield {
            "architecture": ref.name,
            "how": NATIVE,
            "tasks": sorted(architecture.tasks),
            "gguf": sorted(architecture.gguf_architectures),
            "distribution": ref.distribution,
            "summary": architecture.summary,
        }


def render_models() -> str:
    """Return docs/models.md: the project's own architectures."""
    from jackfield.registry import Registry

    rows = [row for row in model_rows(Registry.discover()) if row["distribution"] == "jackfield"]
    lines = ["# Models", "", "<!-- Made by `make docs-config`; do not edit. -->", ""]
    lines += [f"{len(rows)} architectures.", "", "| architecture | models | tasks | GGUF |", "|---|---|---|---|"]
    for row in rows:
        gguf = ", ".join(f"`{name}`" for name in row["gguf"])
        lines.append(f"| `{row['architecture']}` | {row['summary']} | {_cell(row['tasks'])} | {gguf} |")
    return "\n".join(lines) + "\n" + _NOTES


def _cell(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
