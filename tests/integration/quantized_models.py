"""Turns a saved model into a quantized checkpoint, and into the plain one that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import make_tiny, random_prompts
from quantized_writers import Format, Writer
from safetensors.torch import load_file, save_file

from jackfield import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
PROMPTS = random_prompts((30, 5, 17), seed=2)
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def projections(name: str) -> bool:
    """Return whether a module is one of the linear layers of a decoder."""
    return name.rpartition(".")[2] in PARTS


def quantized(
    source: Path,
    folder: Path,
    write: Writer,
    config: Mapping[str, Any],
    which: Callable[[str], bool] = projections,
    keep: Callable[[str], bool] = lambda suffix: True,
) -> tuple[Path, Path]:
    """Save both checkpoints of a model and return their folders.

    Args:
        source: of the model. folder: where to. write: of a module's weight. config: quantization_config. which: modules
            to write so. keep: which of their tensors, by suffix.
    """
    tensors = load_file(source / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    plain = dict(tensors)
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or not which(module):
            packed[name] = tensor
            continue
        found, meaning = write(tensor)
        packed |= {f"{module}.{key}": value for key, value in found.items() if keep(key)}
        plain[name] = meaning
    values = json.loads((source / "config.json").read_text())
    return (
        save(folder / "packed", packed, {**values, "quantization_config": dict(config)}),
        save(folder / "plain", plain, values),
    )


def save(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """Write a model folder."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny(folder: Path, **changes: Any) -> Path:
    """Make a Llama whose sizes suit every format, and return its folder."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, **changes}
    return make_tiny(folder, "llama", **sizes).folder


def of_format(source: Path, folder: Path, kind: Format) -> tuple[Path, Path]:
    """Return both checkpoints of a model in a format."""
    return quantized(source, folder, kind.write, kind.config)


def said(llm: LLM) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Return tokens, and log probabilities at each place."""
    found = []
    for request in llm.generate(PROMPTS, PARAMS):
        output = request.outputs[0]
        assert output.logprobs is not None
        places = [{token: entry.logprob for token, entry in place.items()} for place in output.logprobs]
        found.append((list(output.token_ids), places))
    return found


def same(one: LLM, other: LLM, bound: float = 2e-5) -> None:
    """Hold one engine's answers against another's; ``bound`` of the difference of log probabilities."""
    for (tokens, places), (right_tokens, right_places) in zip(said(one), said(other), strict=True):
        assert tokens == right_tokens
        for place, right in zip(places, right_places, strict=True):
            assert place == pytest.approx(right, abs=bound)
