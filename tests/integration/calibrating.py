"""What tests of calibrated writers have in common: a text, the command, and models rounded without any text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from quantized_models import save
from safetensors.torch import load_file

from jackfield import LLM, SamplingParams
from jackfield.cli import main
from jackfield_quantization.calibrated import CalibratedPlan
from jackfield_quantization.rounding import nearest

CALIBRATING = (
    "Rivers carry sand and clay to the sea, where both sink slowly and become stone. A baker weighs flour, water "
    "and salt, and lets the dough rest until it has doubled. Trains of the last century burned coal; those of "
    "today draw current from a wire above the rails. In spring the days grow longer, and birds return from the "
    "south to build their nests. A letter that is sent by post needs two days; a message over a cable needs less "
    "than a second. Most metals are heavier than water, but wood and ice float on it. Whoever learns a language "
    "begins with the names of things. "
)
MEMORY = ("--kv-cache-memory", "64MiB")


def write_text(folder: Path) -> Path:
    """Write a text to calibrate with."""
    file = folder / "text.txt"
    file.write_text(CALIBRATING * 6)
    return file


def command(source: Path, folder: Path, format: str, *flags: str) -> list[str]:
    """Return the words of the command."""
    return ["quantize", str(source), "--output", str(folder), "--format", format, *MEMORY, *flags]


def written(source: Path, folder: Path, format: str, text: Path, *flags: str) -> dict[str, Any]:
    """Write a checkpoint and return its quantization_config."""
    assert main([*command(source, folder, format, *flags), "--text", str(text), "--sample-length", "128"]) == 0
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def rounded_to_nearest(source: Path, folder: Path, plan: CalibratedPlan) -> Path:
    """Save a model whose matrices in layers are rounded group by group."""
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if "_proj.weight" in name:
            tensors[name] = nearest(weight, plan).to(weight.dtype)
    target = save(folder, tensors, json.loads((source / "config.json").read_text()))
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, target / file.name)
    return target


def distance(llm: LLM, other: LLM) -> float:
    """Return how far log probabilities of every token at every place of a text lie apart, as a mean square."""
    found = []
    for one in (llm, other):
        (request,) = one.generate([CALIBRATING[:300]], SamplingParams(max_tokens=1, prompt_logprobs=-1))
        assert request.prompt_logprobs is not None
        places = [place for place in request.prompt_logprobs if place]
        found.append(torch.tensor([[place[token].logprob for token in sorted(place)] for place in places]))
    return float((found[0] - found[1]).square().mean())
