"""Mixture of experts: routing in the core, expert matrices by an experts backend. Legend: T tokens, X experts, S
chosen, E width, F intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from jackfield.errors import PluginError
from jackfield.interfaces import Communicator, LayerInfo, LinearScheme, MoEConfig, Parallel
from jackfield.interfaces.moe import Dispatcher, ExpertMatrices, ExpertsBackend
from jackfield.layers.dispatch import LocalDispatcher
from jackfield.layers.parameters import LoadableModule, SchemeWeight
from jackfield.layers.routing import SCORES, check_routing, route
from jackfield.layers.side import SideStream

__all__ = ["ExpertWeight", "Moe", "route"]


class Moe(LoadableModule):
    """A block of routed experts; gate and up are stacked per expert.

    Args:
        name: module path. config: of the block. up, down: the matrices' facts and schemes. backend: multiplies.
        communicator: of ranks that share each expert. device: of the weights. ops: chosen implementations.
        dispatcher: brings tokens to experts.
        held: place of each expert of this rank, or None for all. side: where shared experts run.
    """

    def __init__(
        self,
        name: str,
        config: MoEConfig,
        gate_up: tuple[LayerInfo, LinearScheme],
        down: tuple[LayerInfo, LinearScheme],
        backend: ExpertsBackend,
        communicator: Communicator,
        device: torch.device,
        *,
        ops: Mapping[str, Callable[..., Any]],
        dispatcher: Dispatcher | None = None,
        held: Mapping[int, int] | None = None,
        side: SideStream | None = None,
    ) -> None:
        super().__init__(name)
        check_routing(config)
        self.config = config
        self.gate_up = ExpertWeight(*gate_up, device, held)
        self.down = ExpertWeight(*down, device, held)
        for weight in (self.gate_up, self.down):
            _check_layout(weight, backend)
        published = config.route is None and config.scoring in SCORES
        self._route = ops["route_experts"] if published else route
        self._backend = backend
        self._communicator = communicator
        self._dispatcher = dispatcher or LocalDispatcher()
        self._side = side or SideStream(device)

    def forward(
        self,
        x_TE: torch.Tensor,
        logits_TX: torch.Tensor,
        bias_X: torch.Tensor | None = None,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return [T, E]; ``bias_X`` acts on the choice alone, ``shared`` is added."""
        if shared is None:
            return self._routed(x_TE, *self._route(logits_TX, self.config, bias_X))
        added = self._side.start(shared, x_TE)
        out_TE = self._routed(x_TE, *self._route(logits_TX, self.config, bias_X))
        return out_TE.add_(added())

    def warm_up(self, most: int) -> None:
        """Run every kernel of the backend that a step of at most so many rows may need."""
        weight, config = self.gate_up.matrices().weight, self.config
        dtype = getattr(torch, self.gate_up.info.dtype)
        for rows in sorted({rows for rows in self._backend.kernel_rows() if rows <= most}):
            x_NE = torch.zeros((rows, config.hidden_size), dtype=dtype, device=weight.device)
            pairs = torch.arange(rows * config.top_k, device=weight.device) % len(weight)
            experts_NS = pairs.view(rows, config.top_k)
            matrices = self.gate_up.matrices(), self.down.matrices()
            self._backend.apply(x_NE, *matrices, torch.zeros(experts_NS.shape, device=weight.device), experts_NS)

    def _routed(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> torch.Tensor:
        if self.config.zero_experts:
            return self._with_zeros(x_TE, weights_TS, experts_TS)
        if self.config.weigh_input:
            return self._weighed_first(x_TE, weights_TS, experts_TS)
        return self._dispatched(x_TE, weights_TS, experts_TS)

    def _dispatched(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> torch.Tensor:
        rows = self._dispatcher.prepare(x_TE, weights_TS, experts_TS)
        up, down = self.gate_up.matrices(), self.down.matrices()
        out_NE = self._backend.apply(rows.x, up, down, rows.weights, rows.experts)
        return self._communicator.all_reduce(self._dispatcher.finalize(out_NE, rows))

    def _weighed_first(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> torch.Tensor:
        """Return the sum of experts of weighed inputs: each pair of token and expert is a row of its own."""
        tokens, chosen = weights_TS.shape
        rows = (x_TE.unsqueeze(1) * weights_TS.unsqueeze(-1).to(x_TE.dtype)).flatten(0, 1)
        ones = torch.ones((tokens * chosen, 1), dtype=torch.float32, device=x_TE.device)
        out = self._dispatched(rows, ones, experts_TS.reshape(-1, 1))
        return out if chosen == 1 else torch.unflatten(out, 0, (tokens, chosen)).sum(1)

    def _with_zeros(self, x_TE: torch.Tensor, weights_TS: torch.Tensor, experts_TS: torch.Tensor) -> torch.Tensor:
        """Return the sum where choices past the routed experts return their input (arXiv:2410.07348)."""
        zero = experts_TS >= self.config.num_experts
        kept = (weights_TS * zero).sum(-1, keepdim=True).to(x_TE.dtype)
        # Any expert will do where the weight is 0.
        routed = self._dispatched(x_TE, weights_TS.masked_fill(zero, 0.0), experts_TS.masked_fill(zero, 0))
        return routed.addcmul_(x_TE, kept)


class ExpertWeight(SchemeWeight):
    """The stacked matrices of the experts of this rank; a checkpoint tensor of one expert fills one slice. ``held`` is
    the place of each of them, or None for all experts in their order.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        info: LayerInfo,
        scheme: LinearScheme,
        device: torch.device,
        held: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(info, scheme, device)
        self._held = held
        self._loaded: dict[str, set[tuple[int, str]]] = {}
        self.bias = None
        if info.bias:
            size, dtype = (info.num_experts, sum(info.local_output_sizes)), getattr(torch, info.dtype)
            self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)
            self._expect("bias", [s.name for s in info.shards])

    def load_expert(self, expert: int, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take one expert's tensor; return False when no parameter wants that suffix. Experts of other ranks are
        taken and not kept.
        """
        if suffix == "bias" and self.bias is not None:
            return self._load_bias(self.bias, expert, shard, tensor)
        wanted = self._wanted(shard, suffix)
        place = expert if self._held is None else self._held.get(expert)
        if place is None:
            return bool(wanted)
        for spec in wanted:
            stacked = tensor.unsqueeze(0)
            self._copy(self._place(spec, shard)[place : place + 1], self._cut(spec, shard, stacked), spec.name)
            self._count(spec.name, place, shard, 1 if spec.shard is not None else len(self.info.shards))
        return bool(wanted)

    def matrices(self) -> ExpertMatrices:
        """Return the final matrices, as backends take them."""
        found = self._parameters
        return ExpertMatrices(
            self.scheme.layout,
            self.get_parameter("weight"),
            found.get("weight_scale"),
            found.get("weight_zero"),
            self.bias,
        )

    def _load_bias(self, bias: torch.Tensor, expert: int, shard: str, tensor: torch.Tensor) -> bool:
        place = expert if self._held is None else self._held.get(expert)
        if place is None:
            return True
        start, info = 0, self.info
        for part, size in zip(info.shards, info.local_output_sizes, strict=True):
            if part.name == shard:
                if info.parallel is Parallel.COLUMN:
                    tensor = self._part(tensor, 0, part.size, *part.slice(info.rank), "bias")
                self._copy(bias[place, start : start + size], tensor, "bias")
                if info.parallel is Parallel.ROW and info.rank.rank:
                    bias[place].zero_()  # results are added over ranks: one of them adds the bias
                self._count("bias", place, shard, len(info.shards))
            start += size
        return True

    def _count(self, name: str, place: int, shard: str, shards: int) -> None:
        loaded = self._loaded.setdefault(name, set())
        loaded.add((place, shard))
        if len(loaded) == self.info.num_experts * shards:
            for part in self.info.shards:
                self._filled(name, part.name)


def _check_layout(weight: ExpertWeight, backend: ExpertsBackend) -> None:
    """Refuse matrices in a layout that the backend was not chosen for: a method that leaves some layers alone."""
    if weight.scheme.layout not in type(backend).kinds:
        raise PluginError(
            f"{weight.path} is in the layout '{weight.scheme.layout}', which the experts backend does not take",
            field="moe",
            value=type(backend).name,
            remedy="name another one with moe.force; jackfield explain shows which there are",
        )
