"""Draft heads that were trained for real models, in little room.

``smollm2-135m-eagle3.safetensors`` and ``smollm2-135m-medusa.safetensors`` were made by ``benchmarks/gpu_drafters.py``
from answers that SmolLM2-135M-Instruct wrote itself (docs/benchmarks.md says how); their matrices are rounded to eight
bits, with a scale for each row. The Medusa heads share the target's projection, which is not in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SCALE = "_scale"


def unpack(name: str, folder: Path, more: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write a head as a checkpoint in its published layout, in bfloat16; return the folder.

    Args:
        more: tensors that are in the checkpoint and not in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(Path(__file__).with_name(f"{name}.safetensors"), "pt") as file:
        (folder / "config.json").write_text(file.metadata()["config"])
        names = file.keys()
        tensors = {key: file.get_tensor(key) for key in names}
    whole = {key: tensor.bfloat16().contiguous() for key, tensor in (more or {}).items()}
    for key, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensor = (tensor.float() * tensors[key + SCALE][:, None]).bfloat16()
        if not key.endswith(SCALE):
            whole[key] = tensor
    save_file(whole, folder / "model.safetensors")
    return folder
