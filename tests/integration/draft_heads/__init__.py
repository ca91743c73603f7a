"""Draft heads that were trained for real models, in little room.

``smollm2-135m-eagle3.safetensors`` was made by ``benchmarks/gpu_drafters.py`` from answers that SmolLM2-135M-Instruct
wrote itself (docs/benchmarks.md says how); its matrices are rounded to eight bits, with a scale for each row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SCALE = "_scale"


def unpack(name: str, folder: Path) -> Path:
    """Write a head as a checkpoint in its published layout, in bfloat16; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(Path(__file__).with_name(f"{name}.safetensors"), "pt") as file:
        (folder / "config.json").write_text(file.metadata()["config"])
        names = file.keys()
        tensors = {key: file.get_tensor(key) for key in names}
    whole = {}
    for key, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensor = (tensor.float() * tensors[key + SCALE][:, None]).bfloat16()
        if not key.endswith(SCALE):
            whole[key] = tensor
    save_file(whole, folder / "model.safetensors")
    return folder
