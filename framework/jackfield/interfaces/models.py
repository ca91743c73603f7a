"""ModelArchitecture: one architecture of the model zoo. Group ``jackfield.models.v1``; the entry point's name is the
HF architecture string.

The light class reads configuration and describes; ``build`` imports the torch modules from a module of its own
(``decoder.py`` and ``decoder_model.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.building import AttentionGroup, BuildContext, ForwardContext
from jackfield.interfaces.moe import MoEConfig
from jackfield.interfaces.plugin import Plugin, Request
from jackfield.interfaces.pooling import PoolerConfig
from jackfield.interfaces.weights import WeightMap

if TYPE_CHECKING:
    import torch
    from torch import nn

TASKS = frozenset({"generate", "pool", "encode", "draft"})

INERT_KEYS = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_return_dict",
        "tokenizer_class",
        "prefix",
        "problem_type",
        "id2label",
        "label2id",
        "task_specific_params",
        "finetuning_task",
        "torchscript",
        "use_bfloat16",
        "gradient_checkpointing",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout",
        "classifier_dropout",
        "embedding_dropout",
        "pretraining_tp",
        "auto_map",
        "quantization_config",
        "generation_config",
        "max_length",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "num_beams",
        "chunk_size_feed_forward",
        "is_decoder",
        "is_encoder_decoder",
        "add_cross_attention",
        "tie_encoder_decoder",
        "cross_attention_hidden_size",
        "pruned_heads",
        "output_scores",
        "router_aux_loss_coef",
        "output_router_logits",
        "aux_loss_alpha",
        "seq_aux",
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "transformers.js_config",
        "unsloth_version",
    }
)
"""Keys of config.json that do not change the mathematics of inference, or that every reader reads by default."""


class ConfigReader(Protocol):
    """Reads HF configuration keys and remembers which were read, so that a key that nobody read is an error and not
    a silent difference.
    """

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` when it is absent or null."""
        ...

    def require(self, key: str, type_: type) -> Any:
        """Return the value of ``key``; raises CheckpointError when it is absent or of another type."""
        ...

    def ignore(self, *keys: str) -> None:
        """Say that these keys are known and do not matter here."""
        ...

    def section(self, key: str) -> ConfigReader | None:
        """Return a reader of a nested object (whose unread keys count too), or None when absent or null."""
        ...

    def everything(self) -> Mapping[str, Any]:
        """Return all keys as they are, nested ones too; all of them count as read. For architectures that hand the
        whole configuration to somebody who reads all of it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest(Request):
    """Asks for an architecture. ``kind`` is the HF architecture string or ``gguf:NAME``.

    Args:
        task: ``generate``, ``pool`` or ``encode``.
        container: ``safetensors``, ``gguf`` or ``config``.
        quantization: format of the checkpoint, or ``""``.
        config: keys of config.json, for plugins that serve any architecture; no part of reports.
        rivals: plugins that name this very architecture, where the user named none. A plugin that serves any
            architecture leaves it to them, also where they did not load.
    """

    task: str = "generate"
    container: str = "safetensors"
    quantization: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """What the engine must know of any text model. Architectures subclass it with what their modules need.

    Args:
        vocab_size: rows of the embedding. hidden_size: width. num_layers: layers that mix tokens.
        max_position: longest sequence the model was made for. dtype: type the checkpoint was saved for, or ``""``.
        eos_token_ids, bos_token_id: from the model's config. tie_embeddings: the head is the embedding.
        token_types: rows of the table that tells the texts of a pair apart; 0: there is none.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    dtype: str = ""
    tie_embeddings: bool = False
    token_types: int = 0


class ModelArchitecture(Plugin):
    """One architecture. What a model does not have is a feature that it does not declare.

    Features: ``pipeline`` (``stage``), ``taps`` (hidden states for drafters), ``embeddings_in``, ``multimodal``,
    ``adapters``.
    """

    family: ClassVar[str] = "models"
    tasks: ClassVar[frozenset[str]] = frozenset({"generate"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    """Values of GGUF's ``general.architecture`` that this class reads. Also listed in ``kinds`` as ``gguf:NAME``."""
    recordable: ClassVar[bool] = True
    """Whether ``forward`` and ``logits`` may be recorded into graphs: they neither wait for the device nor depend on
    values, but inside ``ForwardContext.unrecorded``.
    """
    draft_layers: ClassVar[str] = ""
    """Name of the architecture (of the task ``draft``) that builds those layers of its checkpoints that only draft; it
    is given the same config.json, and of the tensors those that :meth:`weight_map` ignores. ``""``: nobody does.
    """

    @classmethod
    @abstractmethod
    def config(cls, hf: ConfigReader) -> TextConfig:
        """Return the architecture's own frozen configuration: the one place that reads HF keys."""

    @classmethod
    def gguf_config(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """Return HF-style configuration keys from GGUF metadata and tensor shapes. The numbers of a tensor
        ``rope_freqs.weight`` are in the metadata, as ``ARCH.rope.factors``: what each rotary frequency is divided by.
        """
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def attention_groups(cls, config: Any) -> tuple[AttentionGroup, ...]:
        """Return the groups of layers that mix tokens; every layer in exactly one."""

    @classmethod
    def experts(cls, config: Any) -> MoEConfig | None:
        """Return what its mixture-of-experts blocks look like, or None when it has none."""
        return None

    @classmethod
    def pooler(cls, config: Any) -> PoolerConfig:
        """Return how its hidden states become results for the ``pool`` task, as far as the architecture says."""
        return PoolerConfig()

    @classmethod
    @abstractmethod
    def weight_map(cls, config: Any, container: str) -> WeightMap:
        """Return where each tensor of a checkpoint of that container goes."""

    @classmethod
    @abstractmethod
    def build(cls, config: Any, ctx: BuildContext) -> nn.Module:
        """Return the torch module, a :class:`TextModel` for the ``generate`` task."""


class TextModel(Protocol):
    """What the runner calls on a built model. E is the hidden size, V the vocabulary."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return input embeddings [T, E]."""
        ...

    def forward(self, hidden_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, E] (normed), from embeddings or from a stage's intermediate states.
        Positions are [T] or [3, T].
        """
        ...

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of the rows that are needed."""
        ...


class DraftLayers(Protocol):
    """What drafters call on a built model of the task ``draft`` that goes on from features of the target."""

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return features [T, E] of what the target gave, as :meth:`forward` takes them."""
        ...

    def forward(
        self, embeds_TE: torch.Tensor, features_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features [T, E] to go on from, and states [T, E] for :meth:`logits`.

        Args:
            embeds_TE: the target's embeddings of the tokens behind those of the features. positions_T: of the features.
        """
        ...

    def logits(self, states_BE: torch.Tensor, target: TextModel) -> torch.Tensor:
        """Return logits [B, V] over the target's vocabulary; ``target`` is for those that share its head."""
        ...


class LabelModel(TextModel, Protocol):
    """A model with a head that scores labels."""

    def classify(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return scores [R, L] of pooled hidden states."""
        ...


class TokenVectorModel(TextModel, Protocol):
    """A model whose embeddings are not its hidden states."""

    def project(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Return the vectors [T, D] of tokens."""
        ...
