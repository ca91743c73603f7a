"""A target whose next token hangs on the last one above all, and texts that it wrote: something that can be learnt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hf import Tiny, make_tiny

from jackfield import LLM, SamplingParams

WIDTH, VOCAB, LAYERS = 64, 260, 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
QUIET = 0.004
"""What layers add, beside what a random model's add: texts soon go round in circles."""
TEXTS, LENGTH = 100, 30


@dataclass(frozen=True)
class Learnable:
    """A target, a file with its texts, and prompts that are in none of them."""

    tiny: Tiny
    text: Path
    prompts: list[list[int]]

    @property
    def folder(self) -> Path:
        return self.tiny.folder


def make_learnable(folder: Path) -> Learnable:
    """Make the target, and let it write texts."""
    tiny = make_tiny(folder / "target", "llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for name, parameter in tiny.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(QUIET)
    tiny.model.save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, 256, (TEXTS, 2), generator=generator)
    texts = [ids[: LENGTH - at % 14] for at, ids in enumerate(continued(tiny.model, starts, LENGTH))]
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"token_ids": ids}) for ids in texts[:-10]))
    return Learnable(tiny, text, [ids[:12] for ids in texts[-10:]])


@torch.no_grad()
def continued(model: Any, ids_BL: torch.Tensor, length: int) -> list[list[int]]:
    """Return texts with their greedy continuations."""
    while ids_BL.shape[1] < length:
        ids_BL = torch.cat((ids_BL, model(ids_BL).logits[:, -1:].argmax(-1)), 1)
    return ids_BL.tolist()


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Return greedy answers."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def kept(llm: LLM) -> float:
    """Return drafts that were kept in a round, on average."""
    metrics = llm.get_metrics()
    assert metrics.draft_rounds > 0
    return metrics.drafts_accepted / metrics.draft_rounds
