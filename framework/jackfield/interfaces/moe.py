"""ExpertsBackend: the matrix work of a mixture-of-experts block. Group ``jackfield.moe_experts.v1``.

A block has three steps. A :class:`Dispatcher` *prepares* rows: it brings tokens to the rank that has their experts.
The *experts* backend multiplies. The dispatcher *finalizes*: it brings results back and adds them. Routing is the
core's. The quantization method owns the weights up to a published layout; a backend declares the layouts it accepts.

Legend: T tokens, N rows after dispatch, S experts per token, X experts of this rank, E width, F inner, O outputs of a
matrix, I its inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.facts import DeviceFacts
from jackfield.interfaces.plugin import Plugin, Request

if TYPE_CHECKING:
    import torch

LAYOUTS = frozenset({"dense", "fp8", "int8", "int4", "mxfp4"})
"""Published layouts of expert matrices, as parameters of a layer; X experts are in front of all of them.

``dense``: ``weight`` [X, O, I] in the computation type.
``fp8``: ``weight`` [X, O, I] float8_e4m3fn, ``weight_scale`` float32 [X, O / A, I / G] over blocks of A rows and G
columns; [X, O, 1] is a scale for each row.
``int8``: ``weight`` [X, O, I] int8, ``weight_scale`` [X, O, I / G].
``int4``: ``weight`` [X, O, I / 2] uint8 with the even column in the low four bits, ``weight_scale`` [X, O, I / G], and
numbers less 8, or less ``weight_zero`` (uint8, [X, O, I / G]) where there is one.
``mxfp4`` (OCP Microscaling 1.0): ``weight`` [X, O, I / 2] uint8 with two E2M1 numbers as in int4, ``weight_scale``
[X, O, I / 32] uint8, exponents of two less 127.

Gate and up are stacked along O, the gate first. Biases are ``bias`` [X, O] in the computation type.
"""

FEATURES = frozenset(
    {
        "bias",  # matrices have biases
        "ungated",  # one projection and an activation, instead of two that are multiplied
        "partial",  # rows may name the expert -1: somebody else's, which adds nothing
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """A block of experts, and how tokens find them.

    Args:
        num_experts: routed experts X. top_k: experts per token S. hidden_size: E. intermediate_size: F of one expert.
        activation: as in BuildContext.activation, or one of those with ``alpha`` and ``limit``. ``swiglu_oai``:
            ``(up + 1) * gate * sigmoid(alpha * gate)`` with the gate at most ``limit`` and up between its negative and
            it. ``swiglu_step``: ``silu(gate) * up``, bounded alike. ``situ``: ``alpha * tanh(gate / alpha) *
            sigmoid(gate) * limit * tanh(up / limit)``; a limit of 0 leaves up as it is. gated: an expert multiplies two
            projections.
        scoring: what logits become: ``softmax`` or ``sigmoid`` over all experts, before the choice; ``softmax_chosen``
            or ``sigmoid_chosen``, of the chosen ones alone; ``sqrtsoftplus``; ``sparsemixer`` (arXiv:2409.12136);
            ``none``: weights are the logits themselves.
            ``simulated_uniform`` and ``simulated_skewed`` look at no logits: they are for measurements.
        renormalize: make the chosen weights sum to 1. floor: least sum that they are divided by.
        num_groups, top_groups: only experts of the best groups can be chosen. group_score: of a group, its best expert
            (``max``, DeepSeek-V2) or the sum of its two best (``top2``, DeepSeek-V3).
        scale: factor on the weights. jitter: how far below the best a logit may lie (``sparsemixer``).
        weigh_input: weights act on an expert's input and not on its result (Llama 4).
        zero_experts: choices behind the routed ones that return their input as it is.
        bias: whether experts have biases. route: another way to choose, in place of ``scoring``, groups and weights:
            (logits [T, X], config, bias of the choice [X] or None) → (weights [T, S], experts [T, S]).
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    alpha: float = 1.702
    limit: float = 7.0
    scoring: str = "softmax"
    renormalize: bool = True
    floor: float = 1e-20
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0
    jitter: float = 0.01
    weigh_input: bool = False
    zero_experts: int = 0
    bias: bool = False
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of one projection of all experts, in a layout of :data:`LAYOUTS`."""

    layout: str
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsRequest(Request):
    """Asks for expert kernels; ``kind`` is the weight layout.

    Args:
        num_experts: X. top_k: S. hidden_size: E. intermediate_size: F on this rank. activation, gated, alpha, limit: as
            in MoEConfig.
    """

    num_experts: int = 0
    top_k: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    activation: str = "silu"
    gated: bool = True
    alpha: float = 1.702
    limit: float = 7.0


def experts_request(
    config: MoEConfig,
    layout: str,
    *,
    dtype: str = "",
    device: DeviceFacts | None = None,
    ranks: int = 1,
    held: int | None = None,
    partial: bool = False,
) -> ExpertsRequest:
    """Return what a block asks of a backend.

    Args:
        config: the block. layout: of its matrices. dtype: computation type. device: that it runs on. ranks: that share
            each expert. held: experts of this rank, if not all. partial: rows may name experts of other ranks.
    """
    there = {"bias": config.bias, "ungated": not config.gated, "partial": partial}
    held = config.num_experts if held is None else held
    return ExpertsRequest(
        subject=f"{config.num_experts} experts",
        kind=layout,
        needs=frozenset(name for name, is_there in there.items() if is_there),
        dtype=dtype,
        device=device,
        num_experts=held,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size // ranks,
        activation=config.activation,
        gated=config.gated,
        alpha=config.alpha,
        limit=config.limit,
    )


@dataclass(slots=True)
class Dispatched:
    """Rows as a backend sees them.

    Args:
        x: [N, E]. weights: [N, S] float32. experts: [N, S] int64, indices of this rank's matrices, or -1. state: the
            dispatcher's own.
    """

    x: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    state: Any = None


class Dispatcher(Protocol):
    """Brings tokens to experts and results back. All ranks call it in the same order."""

    partial: bool
    """Whether rows may name the expert -1."""

    def prepare(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> Dispatched:
        """Return the rows that this rank computes."""
        ...

    def finalize(self, out_NE: torch.Tensor, rows: Dispatched) -> torch.Tensor:
        """Return [T, E]: for each token of this rank the sum over its experts, wherever they were computed."""
        ...


def tuned_folder() -> Path:
    """Return where what tuners found on this machine is kept, a JSON file each, ahead of what plugins bring along."""
    return Path.home() / ".cache" / "jackfield" / "tuned" / "moe"


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuner found.

    Args:
        name: of the file, without its ending: the sizes, types and device that it is for. content: JSON. notes: lines
            to show.
    """

    name: str
    content: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)


class ExpertsBackend(Plugin):
    """Applies chosen experts to rows."""

    family: ClassVar[str] = "moe_experts"

    @classmethod
    @abstractmethod
    def build(cls, request: ExpertsRequest) -> Any:
        """Return an object with :meth:`apply`."""

    def apply(
        self,
        x_NE: torch.Tensor,
        up: ExpertMatrices,
        down: ExpertMatrices,
        weights_NS: torch.Tensor,
        experts_NS: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts, [N, E], in the type of ``x``.

        Args:
            x_NE: rows. up: gate and up stacked, O = 2F, or up alone, O = F. down: O = E, I = F. weights_NS: float32.
            experts_NS: int64; where the request needs ``partial``, -1 stands for no expert.
        """
        raise NotImplementedError

    def kernel_rows(self) -> Sequence[int]:
        """Return numbers of rows that each run kernels of their own: the engine multiplies so many once before the
        first request, so that no user waits for a compiler.
        """
        return ()

    @classmethod
    def tune(cls, request: ExpertsRequest, progress: Callable[[str], None]) -> Tuned | None:
        """Measure on this machine's device what is fastest and return it, or None where there is nothing to tune.

        Args:
            request: as it was decided. progress: takes a line of text now and then.
        """
        return None
