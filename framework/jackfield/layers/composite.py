"""Two attention backends on one cache: one for sequences with a single new token, one for all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionStep,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    StepLimits,
    TreeMask,
)


@dataclass(frozen=True, slots=True)
class Composite:
    """Prefill by one backend, decode by another; both read and write the same layout."""

    prefill: type[AttentionBackend]
    decode: type[AttentionBackend]

    @property
    def prepares(self) -> bool:
        """Whether the part that writes prepares."""
        return self.prefill.prepares

    @property
    def graph_support(self) -> GraphSupport:
        """What both can do; a step of decodes alone needs the decode part only."""
        return min(self.decode.graph_support, GraphSupport.DECODE)

    @property
    def host_lengths(self) -> HostLengths:
        """What the decode part needs: it alone is recorded into graphs."""
        return self.decode.host_lengths

    def metadata_builder(self, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        return CompositeBuilder(self.prefill.metadata_builder(env), self.decode.metadata_builder(env))

    def layer(self, env: AttentionEnv, index: int) -> CompositeLayer:
        """See AttentionBackend."""
        return CompositeLayer(self.prefill.layer(env, index), self.decode.layer(env, index))


@dataclass(slots=True)
class CompositeMetadata:
    """Metadata of both parts; ``split`` new tokens belong to the decode part."""

    split: int
    decode: Any
    prefill: Any


class CompositeBuilder:
    """Cuts a step in two. Sequences with one new token come first in every step."""

    def __init__(self, prefill: MetadataBuilder, decode: MetadataBuilder) -> None:
        self._prefill, self._decode = prefill, decode
        order = list(HostLengths)
        self.host_lengths = max(prefill.host_lengths, decode.host_lengths, key=order.index)

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder."""
        self._prefill.allocate(limits)
        self._decode.allocate(limits)

    def build(self, step: AttentionStep) -> CompositeMetadata:
        """See MetadataBuilder."""
        split, total = step.num_decodes, step.num_sequences
        decode = self._decode.build(cut_step(step, 0, split)) if split else None
        prefill = self._prefill.build(cut_step(step, split, total)) if split < total else None
        return CompositeMetadata(split, decode, prefill)

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Graphs of a composite are those of its decode part."""
        return CompositeMetadata(num_sequences, self._decode.capture(num_sequences, max_query), None)

    def advance(self, tokens: int) -> Any:
        """See MetadataBuilder."""
        raise NotImplementedError("a composite backend builds every step anew")


class CompositeLayer:
    """Attention of one layer by two backends."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._prefill, self._decode = prefill, decode

    def write(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """Write once: the layout is shared."""
        self._prefill.write(k_TKD, v_TKD, cache, slots)

    def prepare(self, *arguments: Any) -> None:
        """See PreparingLayer."""
        self._prefill.prepare(*arguments)

    def bind(self, kv_up: Any) -> None:
        """See LatentLayer."""
        self._prefill.bind(kv_up)
        self._decode.bind(kv_up)

    def write_index(self, key_TI: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """See IndexedLatentLayer: write once."""
        self._prefill.write_index(key_TI, cache, slots)

    def choose(
        self,
        q_TJI: torch.Tensor,
        weight_TJ: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        metadata: CompositeMetadata,
    ) -> tuple[Any, Any]:
        """See IndexedLatentLayer: what the parts chose."""
        split, decode, prefill = metadata.split, None, None
        if metadata.decode is not None:
            decode = self._decode.choose(q_TJI[:split], weight_TJ[:split], cache, metadata.decode)
        if metadata.prefill is not None:
            prefill = self._prefill.choose(q_TJI[split:], weight_TJ[split:], cache, metadata.prefill)
        return decode, prefill

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        chosen: tuple[Any, Any],
        cache: Mapping[str, torch.Tensor],
        metadata: CompositeMetadata,
        out_THD: torch.Tensor,
    ) -> None:
        """See IndexedLatentLayer."""
        split, (decode, prefill) = metadata.split, chosen
        if metadata.decode is not None:
            self._decode.attend_chosen(q_THD[:split], decode, cache, metadata.decode, out_THD[:split])
        if metadata.prefill is not None:
            self._prefill.attend_chosen(q_THD[split:], prefill, cache, metadata.prefill, out_THD[split:])

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: CompositeMetadata, out_THD: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        split = metadata.split
        if metadata.decode is not None:
            self._decode.attend(q_THD[:split], cache, metadata.decode, out_THD[:split])
        if metadata.prefill is not None:
            self._prefill.attend(q_THD[split:], cache, metadata.prefill, out_THD[split:])


def cut_step(step: AttentionStep, first: int, last: int) -> AttentionStep:
    """Return the step of sequences ``first`` to ``last`` alone."""
    start, stop = int(step.query_start_host[first]), int(step.query_start_host[last])
    counts = np.diff(step.query_start_host[first : last + 1])
    return replace(
        step,
        num_tokens=stop - start,
        num_sequences=last - first,
        num_decodes=max(0, min(last, step.num_decodes) - first),
        max_query=int(counts.max()),
        query_start=step.query_start[first : last + 1] - start,
        lengths=step.lengths[first:last],
        block_table=step.block_table[first:last],
        slots=step.slots[start:stop],
        positions=step.positions[start:stop],
        query_start_host=step.query_start_host[first : last + 1] - start,
        lengths_host=None if step.lengths_host is None else step.lengths_host[first:last],
        states=None if step.states is None else step.states[first:last],
        tree=None if step.tree is None else _cut_tree(step.tree, start, stop),
    )


def _cut_tree(tree: TreeMask, start: int, stop: int) -> TreeMask:
    """Return what the tokens ``start`` to ``stop`` see."""
    return TreeMask(*(getattr(tree, field.name)[start:stop] for field in fields(tree)))
