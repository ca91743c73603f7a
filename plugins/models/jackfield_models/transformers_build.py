"""Models of transformers without weights, their parts, and how their attention reaches this engine."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import AttentionMaskInterface

from jackfield_models.transformers_fallback import UnfitError

RUN = "jackfield"
"""Name of this engine's attention; transformers makes no masks for a name that it has no masks for."""
TRACE = "jackfield_trace"
"""The same with masks that can be asked."""
PLUGIN_REMEDY = "install a plugin for the architecture"
CHANGING_ROPES = ("dynamic", "longrope")


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' modules call it: [1, H, T, D] → [1, T, H, V]. The module knows who serves it."""
    return module.engine_bound(module, query, key, value, attention_mask, kwargs), None


def probe_mask(*, mask_function: Any, **kwargs: Any) -> torch.Tensor:
    """Return an empty mask that knows which keys a token sees."""
    mask = torch.empty(0, device="meta")
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


for _name in (RUN, TRACE):
    transformers.AttentionInterface.register(_name, attend)
AttentionMaskInterface.register(TRACE, probe_mask)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model with its head, the decoder of text in it, and its input embedding; paths are in the model."""

    model: Any
    trunk: Any
    trunk_path: str
    embedding: nn.Embedding
    embedding_path: str
    head: nn.Linear
    head_path: str

    @property
    def text(self) -> Any:
        """Configuration of the decoder."""
        return self.trunk.config

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return f"{self.head_path}.weight" in self.model.all_tied_weights_keys

    def covers(self, name: str) -> bool:
        """Return whether a module or tensor belongs to the decoder or the head."""
        inside = name.startswith(f"{self.trunk_path}.") or name == self.trunk_path
        return inside or name.startswith(f"{self.head_path}.") or name == self.head_path

    def linears(self, kept: frozenset[str] = frozenset()) -> dict[str, nn.Linear]:
        """Return the decoder's linear layers by path, without those that are kept."""
        found = {f"{self.trunk_path}.{name}": module for name, module in self.trunk.named_modules()}
        return {path: made for path, made in found.items() if type(made) is nn.Linear and path not in kept}


def model_class(architecture: str, keys: Mapping[str, Any]) -> Any:
    """Return transformers' class of that name.

    Raises:
        UnfitError: there is none.
    """
    found = getattr(transformers, architecture, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    if keys.get("auto_map"):
        detail = "its code comes with the checkpoint, and such code is not run"
        raise UnfitError("trust_remote_code", "kind", detail, PLUGIN_REMEDY)
    raise UnfitError("kind", "kind", f"transformers {transformers.__version__} has no class '{architecture}'")


def make_config(made: Any, keys: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object: of ``keys``, or of defaults where there are none.

    Raises:
        UnfitError: it is of another type of models, or transformers refuses its values.
    """
    wanted, said = made.config_class.model_type, keys.get("model_type")
    if keys and said != wanted:
        detail = f"model_type is '{said}', but {made.__name__} has '{wanted}'"
        raise UnfitError("model_type", "config.json: model_type", detail, f"set model_type to '{wanted}'")
    values = {key: value for key, value in keys.items() if key not in ("quantization_config", "compression_config")}
    try:
        return made.config_class.from_dict(values)
    except Exception as error:  # whatever transformers raises is why the model cannot run
        raise UnfitError("config", "config.json", f"transformers refuses the configuration: {_said(error)}") from error


def make_model(architecture: str, keys: Mapping[str, Any], dtype: torch.dtype, implementation: str) -> Parts:
    """Return a model on the meta device.

    Raises:
        UnfitError: it cannot be run by this engine, as far as that can be seen from its parts.
    """
    made = model_class(architecture, keys)
    config = make_config(made, keys)
    if getattr(config, "is_encoder_decoder", False):
        raise UnfitError("encoder_decoder", "kind", "it has an encoder and a decoder", PLUGIN_REMEDY)
    try:
        with torch.device("meta"):
            model = made._from_config(config, dtype=dtype, attn_implementation=implementation).eval()
    except Exception as error:  # see above
        raise UnfitError("build", "kind", f"transformers cannot build the model: {_said(error)}") from error
    return find_parts(model)


def find_parts(model: Any) -> Parts:
    """Return the parts of a model.

    Raises:
        UnfitError: they are not those of a decoder that attends through transformers' attention interface.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    trunk, head = model.get_decoder(), model.get_output_embeddings()
    _check_trunk(model, trunk)
    if type(head) is not nn.Linear or "." in paths.get(id(head), "."):
        raise UnfitError("head", "kind", "it has no output projection over tokens", PLUGIN_REMEDY)
    embedding = trunk.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or id(embedding) not in paths:
        raise UnfitError("embedding", "kind", "its input embedding is no table of rows", PLUGIN_REMEDY)
    parts = Parts(model, trunk, paths[id(trunk)], embedding, paths[id(embedding)], head, paths[id(head)])
    _check_layers(parts)
    return parts


def embedding_scale(parts: Parts) -> float:
    """Return the factor that the embedding puts on its rows, 1 for most.

    Raises:
        UnfitError: it does something else with them.
    """
    if type(parts.embedding) is nn.Embedding:
        return 1.0
    probe = copy.copy(parts.embedding)
    probe.padding_idx = None
    probe._buffers = {name: _empty(buffer) for name, buffer in parts.embedding._buffers.items()}
    rows = torch.linspace(1, 2, 4 * probe.embedding_dim).view(4, -1)
    found = []
    for weight in (torch.ones_like(rows), rows):
        probe._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        with torch.no_grad():
            parts.trunk._init_weights(_without_weight(probe))
            found.append(probe(torch.arange(4)))
    scale = float(found[0].flatten()[0])
    if not torch.allclose(found[1], rows * scale) or not torch.all(found[0] == scale):
        detail = f"its embedding, {type(probe).__name__}, does more than look up rows and multiply"
        raise UnfitError("embedding", "kind", detail, PLUGIN_REMEDY)
    return scale


def fill_buffers(parts: Parts, device: torch.device) -> None:
    """Compute the decoder's buffers that no checkpoint holds, by transformers' own rule for them, and move them.

    Raises:
        UnfitError: transformers has no rule for one of them.
    """
    unfilled = []
    for path, module in parts.trunk.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        names = [name for name in names if name in module._non_persistent_buffers_set]
        module._buffers.update({name: _empty(module._buffers[name]) for name in names})
        if not names:
            continue
        with torch.no_grad():
            parts.trunk._init_weights(module)
        unfilled += [f"{path}.{name}" for name in names if torch.isnan(module._buffers[name]).any()]
        module._buffers.update({name: module._buffers[name].to(device) for name in names})
    if unfilled:
        raise UnfitError("buffers", "kind", f"transformers does not say what is in {', '.join(unfilled)}")


def _check_trunk(model: Any, trunk: Any) -> None:
    name = type(trunk).__name__
    if not getattr(trunk, "_supports_attention_backend", False):
        detail = f"{name} does not take attention from outside (_supports_attention_backend)"
        raise UnfitError("attention_interface", "kind", detail, PLUGIN_REMEDY)
    takes = inspect.signature(trunk.forward).parameters
    lacking = sorted({"inputs_embeds", "position_ids"} - takes.keys())
    if lacking:
        raise UnfitError("arguments", "kind", f"{name} does not take {' and '.join(lacking)}", PLUGIN_REMEDY)
    if trunk is model:
        raise UnfitError("head", "kind", "it has no output projection over tokens", PLUGIN_REMEDY)
    if model.base_model is not trunk and not hasattr(model.config, "text_config"):
        detail = f"{name} is a part of {type(model.base_model).__name__}, which may do more than call it"
        raise UnfitError("parts", "kind", detail, PLUGIN_REMEDY)


def _check_layers(parts: Parts) -> None:
    tables = [
        path for path, m in parts.trunk.named_modules() if isinstance(m, nn.Embedding) and m is not parts.embedding
    ]
    if tables:
        detail = f"it looks up more than input tokens: {', '.join(tables[:3])}"
        raise UnfitError("embedding", "kind", detail, PLUGIN_REMEDY)
    mixing = [path for path, m in parts.trunk.named_modules() if isinstance(m, nn.modules.conv._ConvNd)]
    if mixing:
        raise UnfitError("layers", "kind", f"it mixes tokens by convolutions: {', '.join(mixing[:3])}", PLUGIN_REMEDY)
    kinds = _rope_kinds(getattr(parts.text, "rope_parameters", None))
    if changing := sorted(kinds & set(CHANGING_ROPES)):
        detail = f"rotary embeddings of type {', '.join(changing)} change with the longest sequence of a step"
        raise UnfitError("rope", "config.json: rope_parameters", detail, PLUGIN_REMEDY)


def _rope_kinds(rope: Any) -> set[str]:
    if not isinstance(rope, Mapping):
        return set()
    below = [_rope_kinds(value) for value in rope.values()]
    return {str(rope["rope_type"])}.union(*below) if "rope_type" in rope else set().union(*below)


def _without_weight(module: nn.Embedding) -> nn.Embedding:
    """Return a copy that shares buffers, with a weight that may be initialized."""
    twin = copy.copy(module)
    twin._parameters = {"weight": nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)}
    return twin


def _empty(buffer: Any) -> Any:
    if buffer is None:
        return None
    fill = float("nan") if buffer.is_floating_point() else 0
    return torch.full_like(buffer, fill, device="cpu")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
