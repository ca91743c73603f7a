"""What a model of transformers does, found by running it once without data. Legend: T tokens, E width, H heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jackfield_models.transformers_build import PLUGIN_REMEDY, TRACE, Parts, embedding_scale, make_model
from jackfield_models.transformers_fallback import Mixer, TransformersConfig, UnfitError
from jackfield_models.transformers_weights import weight_map

TOKENS = 5
INERT = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache",
        "past_key_values",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)
"""Arguments of attention that change nothing here."""
KNOWN = INERT | {"scaling", "sliding_window", "softcap"}


def inspect_model(architecture: str, keys: Mapping[str, Any], quantization: str = "") -> TransformersConfig:
    """Return all that must be known of a model before it is built. Takes a second or so; no weights are made.

    Raises:
        UnfitError: this engine cannot run it by transformers' code.
    """
    parts = make_model(architecture, keys, torch.float32, TRACE)
    embedding_scale(parts)
    text = parts.text
    longest = getattr(text, "max_position_embeddings", None)
    if not longest:
        raise UnfitError("max_position", "config.json", "it has no max_position_embeddings", PLUGIN_REMEDY)
    names = {id(module): path for path, module in parts.model.named_modules()}
    # Before the trace: it changes modules.
    tensors = dict(parts.model.state_dict())
    watch = Watch(names, int(longest))
    _run(parts, watch)
    mixers = watch.mixers
    if len(mixers) != text.num_hidden_layers:
        kinds = ", ".join(sorted(set(getattr(text, "layer_types", None) or ["layers of another kind"])))
        detail = f"{len(mixers)} of its {text.num_hidden_layers} layers attend; it has {kinds}"
        raise UnfitError("layers", "kind", detail, PLUGIN_REMEDY)
    fresh = make_model(architecture, keys, torch.float32, TRACE)
    kept = frozenset(watch.touched)
    return TransformersConfig(
        vocab_size=parts.embedding.num_embeddings,
        hidden_size=parts.embedding.embedding_dim,
        num_layers=len(mixers),
        max_position=int(longest),
        dtype=_dtype(keys),
        tie_embeddings=parts.tied,
        architecture=architecture,
        keys=keys,
        mixers=tuple(mixers),
        kept=kept,
        weights=weight_map(fresh, tensors, kept, quantization),
    )


class Watch:
    """Stands for this engine's attention while a model is run without data, and takes notes."""

    def __init__(self, names: Mapping[int, str], longest: int) -> None:
        self._names, self._longest = names, longest
        self._windows: dict[int, int | None] = {}
        self._seen: list[Any] = []
        self.mixers: list[Mixer] = []
        self.touched: set[str] = set()

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, said: Mapping[str, Any]
    ) -> torch.Tensor:
        """Note one call: [1, H, T, D] → [1, T, H, V]."""
        path = self._names[id(module)]
        if any(mixer.path == path for mixer in self.mixers):
            raise UnfitError("layers", "kind", f"{path} attends more than once in a step", PLUGIN_REMEDY)
        self._check_arguments(path, said)
        window = self._window(path, mask)
        scale = said.get("scaling")
        self.mixers.append(
            Mixer(
                path=path,
                kind="full" if window is None else "sliding",
                window=window,
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_size=q.shape[-1],
                value_head_size=v.shape[-1],
                scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
                softcap=float(said.get("softcap") or 0.0),
            )
        )
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])

    def _check_arguments(self, path: str, said: Mapping[str, Any]) -> None:
        if said.get("s_aux") is not None:
            raise UnfitError("sinks", "kind", f"{path} has attention sinks", PLUGIN_REMEDY)
        unknown = sorted(name for name, value in said.items() if value is not None and name not in KNOWN)
        if unknown:
            detail = f"{path} gives attention what this engine does not take: {', '.join(unknown)}"
            raise UnfitError("attention_arguments", "kind", detail, PLUGIN_REMEDY)

    def _window(self, path: str, mask: Any) -> int | None:
        if not hasattr(mask, "mask_function"):
            raise UnfitError("mask", "kind", f"{path} does not say which tokens it sees", PLUGIN_REMEDY)
        if id(mask) not in self._windows:
            self._seen.append(mask)  # keeps its id from being given to another one
            self._windows[id(mask)] = self._ask(path, mask.mask_function)
        return self._windows[id(mask)]

    def _ask(self, path: str, sees: Any) -> int | None:
        """Return the window of a mask: ask for what three late tokens see."""
        windows = set()
        for at in {self._longest - 1, self._longest - 2, self._longest // 2}:
            keys = torch.arange(self._longest + 1)
            zero, row = torch.tensor(0), torch.tensor(at)
            try:
                seen = torch.as_tensor(sees(zero, zero, row, keys)).expand(len(keys)).nonzero().flatten()
            except Exception as error:  # a mask may need what a run without data does not have
                raise _odd_mask(path) from error
            if not len(seen) or int(seen[-1]) != at or len(seen) != at - int(seen[0]) + 1:
                raise _odd_mask(path)
            windows.add(None if int(seen[0]) == 0 else len(seen))
        # A window that is longer than half of the longest sequence is not felt there.
        real = {window for window in windows if window is not None}
        if len(real) > 1 or (None in windows and real and min(real) <= self._longest // 2):
            raise _odd_mask(path)
        return real.pop() if real else None


class Observed(nn.Module):
    """Stands for a linear layer, and notes whether somebody takes its weight."""

    def __init__(self, path: str, inner: nn.Linear, watch: Watch) -> None:
        super().__init__()
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._path, self._inner, self._watch = path, [inner], watch

    @property
    def weight(self) -> torch.Tensor:
        """The weight, which is noted."""
        self._watch.touched.add(self._path)
        return self._inner[0].weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, which is noted."""
        self._watch.touched.add(self._path)
        return self._inner[0].bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return nothing of the right shape."""
        return x.new_empty(*x.shape[:-1], self.out_features)


class Trunk(nn.Module):
    """Stands for the decoder where only the head is wanted: what goes in comes out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``inputs_embeds`` as the last hidden state."""
        return Hidden(kwargs["inputs_embeds"])


class Hidden:
    """An output of a decoder that has nothing but its hidden states."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _run(parts: Parts, watch: Watch) -> None:
    """Run the decoder and the head on the meta device."""
    for module in parts.trunk.modules():
        module.engine_bound = watch
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            # Experts choose by value, and there are no values.
            module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
    for path, linear in parts.linears().items():
        _replace(parts.model, path, Observed(path, linear, watch))
    width = parts.embedding.embedding_dim
    hidden = torch.empty(1, TOKENS, width, device="meta")
    positions, mask = (torch.empty(1, TOKENS, dtype=dtype, device="meta") for dtype in (torch.long, torch.bool))
    with torch.no_grad():
        try:
            # With a mask given, nobody looks for several sequences in the positions, which have no values.
            parts.trunk(inputs_embeds=hidden, position_ids=positions, attention_mask=mask, use_cache=False)
            parts.model.set_submodule(parts.model.base_model_prefix, Trunk())
            logits = parts.model(inputs_embeds=hidden, use_cache=False).logits
        except UnfitError:
            raise
        except Exception as error:  # whatever transformers' code raises is why it cannot be followed
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UnfitError("trace", "kind", f"its code cannot be run without data: {said}", PLUGIN_REMEDY) from error
    if tuple(logits.shape) != (1, TOKENS, parts.head.out_features):
        raise UnfitError("head", "kind", f"its logits have the shape {tuple(logits.shape)}", PLUGIN_REMEDY)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _odd_mask(path: str) -> UnfitError:
    return UnfitError("mask", "kind", f"{path} sees neither all tokens before nor a window of them", PLUGIN_REMEDY)


def _dtype(keys: Mapping[str, Any]) -> str:
    for section in (keys, keys.get("text_config") or {}):
        value = section.get("dtype") or section.get("torch_dtype")
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return ""
