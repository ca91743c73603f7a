"""Configurations of other tools than the papers' authors': the speculators library, and Model Optimizer for EAGLE-3."""

from __future__ import annotations

from dataclasses import dataclass

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader

LIBRARY = "transformer_layer_config"
"""Where the speculators library has the keys of the decoder layer."""
NOTES = (
    *("speculators_config", "speculators_version", "speculators_model_type", "has_no_defaults_at_init"),
    *("enable_sp_ulysses", "tie_word_embeddings"),
)
"""What the library notes about training and serving, and nothing that is computed depends on."""
OPTIMIZER = "eagle_config"
"""Where Model Optimizer has what EAGLE-3 adds to a decoder layer."""
EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Its settings, and with which of them a layer is the paper's."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a configuration says beside a decoder's keys.

    Args:
        decoder: has the decoder's keys. taps: layers of the target that are looked at, by the layer that comes behind;
            () for the usual three. own_embed: the embedding was trained. normed_taps: states of the target are
            normalized, all together, before they are fused.
    """

    decoder: ConfigReader
    taps: tuple[int, ...]
    own_embed: bool = False
    normed_taps: bool = False


def form_of(hf: ConfigReader) -> Form:
    """Return the form of a configuration.

    Raises:
        CheckpointError: its layers are others than EAGLE-3's.
    """
    taps = tuple(hf.get("eagle_aux_hidden_state_layer_ids", ()))
    decoder = hf.section(LIBRARY)
    if decoder is not None:
        hf.ignore(*NOTES)
        refuse_windows(decoder)
        own, normed = (bool(hf.get(key, False)) for key in ("embed_requires_grad", "norm_before_fc"))
        return Form(decoder, taps, own, normed)
    return Form(hf, taps or _optimizers_taps(hf))


def _optimizers_taps(hf: ConfigReader) -> tuple[int, ...]:
    """Return taps out of Model Optimizer's section, which counts the layers themselves and not those behind them."""
    section = hf.section(OPTIMIZER)
    if section is None:
        return ()
    section.ignore("parallel_draft_heads_num_layers")
    for key, wanted in EXPECTED.items():
        found = section.get(key, wanted)
        if found != wanted:
            raise CheckpointError(
                f"EAGLE-3 layers with another {key} than {wanted} are not supported",
                field=f"{OPTIMIZER}.{key}",
                value=found,
                remedy="use another draft checkpoint",
            )
    return tuple(int(layer) + 1 for layer in section.get("eagle_aux_hidden_state_layer_ids", ()))


def refuse_windows(decoder: ConfigReader) -> None:
    """Refuse layers that do not attend to everything.

    Raises:
        CheckpointError: there are some.
    """
    kinds = decoder.get("layer_types", ())
    # Where types of layers are not said, all of them have the window.
    windows = any(kind != "full_attention" for kind in kinds) or (
        not kinds and decoder.get("use_sliding_window", False)
    )
    decoder.ignore("sliding_window", "max_window_layers", "use_sliding_window")
    if windows:
        raise CheckpointError(
            "draft layers with windows are not supported",
            field=f"{LIBRARY}.layer_types",
            value=list(kinds),
            remedy="use a checkpoint whose layers attend to everything",
        )
