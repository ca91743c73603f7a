"""ModelArchitecture: one architecture of the model zoo. Group ``jackfield.models.v1``; the entry point's name is the
HF architecture string.

The light class reads configuration and describes; ``build`` imports the torch modules from a module of its own
(``decoder.py`` and ``decoder_model.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.moe import MoEConfig
from jackfield.interfaces.plugin import Plugin, Request
from jackfield.interfaces.pooling import PoolerConfig
from jackfield.interfaces.sharding import OutputShard, Parallel
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGroup:
    """Layers that are alike to an attention backend.

    Args:
        name: unique in the model (``full``, ``sliding``). Other fields as in AttentionRequest.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    value_head_size: int = 0
    scale: float = 1.0
    window: int | None = None
    softcap: float = 0.0
    features: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)


class ForwardContext(Protocol):
    """All that a forward pass needs besides its inputs; passed down explicitly. There is no global."""

    def metadata(self, group: str) -> Any:
        """Return the attention metadata of a group of layers."""
        ...

    def cache(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the cache planes of a layer."""
        ...

    def slots(self, group: str) -> torch.Tensor:
        """Return [T] cache slots of the new tokens for a group of layers."""
        ...

    @property
    def adapters(self) -> torch.Tensor | None:
        """[T] adapter index of each token, or None when no adapter is active."""
        ...

    def unrecorded(self, group: str, work: Callable[[Any, int], None]) -> None:
        """Call ``work(metadata of the group, number of tokens)``: attention and its kin, whose sizes depend on the
        step. In a recorded step this is where recordings break; at a replay the tensors that ``work`` holds are
        longer than the step has tokens.
        """
        ...

    def angles(self, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [T, R] of a rotary embedding; computed once per step."""
        ...

    @property
    def token_types(self) -> torch.Tensor | None:
        """[T] which text of a pair each token belongs to, or None where the model does not tell them apart."""
        ...

    @property
    def taps(self) -> frozenset[int]:
        """Layers whose residual stream someone asked for; empty in most engines."""
        ...

    def tap(self, layer: int, hidden_TE: torch.Tensor) -> None:
        """Offer the residual stream after a layer to drafters; keeps it only where someone asked."""
        ...


class BuildContext(Protocol):
    """The building blocks a model is made of. Parallelism, quantization, adapters and backends are inside; a model
    file knows none of them.
    """

    dtype: torch.dtype
    device: torch.device

    def linear(
        self,
        name: str,
        input_size: int,
        outputs: int | Sequence[OutputShard],
        *,
        bias: bool = False,
        parallel: Parallel = Parallel.REPLICATED,
        input_unit: int = 1,
    ) -> Any:
        """Return a linear layer; ``name`` is its module path. Calling it maps [T, I] to [T, O] of this rank (ROW
        layers return the sum over ranks).
        """
        ...

    def embedding(self, name: str, rows: int, size: int) -> Any:
        """Return a vocabulary embedding: ids [T] → [T, size]."""
        ...

    def head(self, name: str, rows: int, size: int, *, bias: bool = False, tied: Any | None = None) -> Any:
        """Return the output projection: [T, size] → [T, rows], gathered over ranks; ``tied`` is the embedding it
        shares its weight with.
        """
        ...

    def norm(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        kind: str = "rms",
        offset: float = 0.0,
        weight: bool = True,
        bias: bool = True,
        over: OutputShard | None = None,
    ) -> Any:
        """Return a norm layer. ``norm(x)`` → y; ``norm.add(x, residual)`` → (norm(x + residual), x + residual).
        ``norm.feed(linear)`` says that one linear layer alone takes its results, so that they may be quantized for it.

        Args:
            name: module path. size: features that are normalized together. eps: added to the mean square.
            kind: ``rms`` or ``layer``. offset: added to the weight (Gemma, Nemotron). weight, bias: whether it
            has them; an ``rms`` has no bias. over: the shard of a COLUMN layer whose outputs [T, heads, D] are
            normalized, for norms that have a weight for each of its features: each head alone (``size`` is D) or all
            of them together (``size`` is the shard's), over all ranks. It has neither ``add`` nor ``feed``.
        """
        ...

    def rotary(self, rotary_dim: int, *, theta: float, scaling: Mapping[str, Any] | None, max_position: int) -> Any:
        """Return a rotary embedding of the first ``rotary_dim`` features; equal ones are shared."""
        ...

    def attention(
        self,
        layer: int,
        group: AttentionGroup,
        *,
        rotary: Any = None,
        q_norm: Any = None,
        k_norm: Any = None,
        norm_last: bool = False,
        sinks: Any = None,
    ) -> Any:
        """Return the attention of one layer: ``attention(qkv, positions, ctx)`` normalizes and rotates q and k, writes
        the cache and attends, [T, H·D + K·D + K·Dv] → [T, H·Dv]. It is one call so that a platform can fuse it.
        With ``norm_last`` it rotates before it normalizes. A group that needs ``alibi`` has the slopes of all heads in
        ``extra["alibi_slopes"]``. A group that needs ``sinks`` gets a module of :meth:`parameters` whose ``weight`` [H]
        is a logit that takes part in each head's softmax and adds nothing.
        """
        ...

    def latent_attention(self, layer: int, group: AttentionGroup, *, kv_up: Any, rotary: Any) -> Any:
        """Return multi-head latent attention of one layer: ``attention(q, latent, rope, positions, ctx)``, with q
        [T, H, N + P] (rotated features last), latent [T, R], rope [T, P] → [T, H·V]. ``kv_up`` is the COLUMN layer
        [R] → [H·(N + V)]. The group has ``head_size`` N + P, and in ``extra`` ``latent_size`` R and ``rope_size`` P.
        """
        ...

    def recurrent(self, layer: int) -> Any:
        """Return the mixing of a layer with states: ``convolve(x, weights, ctx)`` [T, C] → [T, C] and
        ``mix(tokens, constants, out, ctx)`` → out. What the states look like follows from the group's ``extra``, the
        names of inputs from its kind (docs/plugins/attention.md).
        """
        ...

    def parameters(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        shards: Sequence[OutputShard] = (),
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a module with small parameters as attributes, by checkpoint suffix and shape; a tensor that a weight
        rule names whole has the suffix ``weight``.

        Args:
            name: module path. shapes: of the whole tensors. shards: what the first dimension is made of, where it is
            cut among ranks. dtype: storage type, if not the model's.
        """
        ...

    def gated_norm(
        self,
        name: str,
        shard: OutputShard,
        eps: float,
        *,
        size: int = 0,
        activation: str = "silu",
        gate_first: bool = True,
        shared: bool = False,
    ) -> Any:
        """Return a root-mean-square norm beside a gate, ``norm(x, gate)`` over the outputs [T, I] of a COLUMN layer's
        ``shard``.

        Args:
            name: module path. eps: added to the mean square. size: features normalized together, 0 for all.
            activation: of the gate, ``silu`` or ``sigmoid``. gate_first: the gate comes before the norm. shared: one
            weight of ``size`` for all groups.
        """
        ...

    def activation(self, name: str, *, gated: bool = True) -> Any:
        """Return an activation by its HF name, over fused gate and up (``[T, 2F] → [T, F]``, the activation of the gate
        times up) or, where it is not ``gated``, over each number (``[T, F] → [T, F]``). It has ``feed`` as norms have.
        """
        ...

    def moe(self, name: str, config: MoEConfig) -> Any:
        """Return a mixture-of-experts block: ``moe(x, router_logits, choice_bias, shared)`` → [T, E].

        ``choice_bias`` [X] is added to scores where experts are chosen, and nowhere else; ``shared`` is a module whose
        results are added, beside the experts where the device can do two things at once. Both may be None.
        """
        ...

    def local_heads(self, heads: int) -> int:
        """Return how many of ``heads`` query heads this rank computes."""
        ...

    def local_kv_heads(self, heads: int) -> int:
        """Return how many of ``heads`` cache heads this rank holds (at least 1)."""
        ...


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

    @classmethod
    @abstractmethod
    def config(cls, hf: ConfigReader) -> TextConfig:
        """Return the architecture's own frozen configuration: the one place that reads HF keys."""

    @classmethod
    def gguf_config(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """Return HF-style configuration keys from GGUF metadata and tensor shapes."""
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
