"""Layers of every kind as requests, small enough to be computed token by token. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jackfield.interfaces import AttentionRequest, OutputShard, RankInfo

ALONE = RankInfo()
PHASES = frozenset({"prefill", "chunked_prefill", "decode", "mixed"})
"""What an engine needs of a backend that serves both phases."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layer of softmax attention over a paged cache.

    Args:
        ratio: query heads that share a cache head. window: of ``sliding`` layers, or of ``chunked_local`` ones where
            ``chunked``. alibi, sinks: whether it has linear biases and sinks. cache_dtype: ``""`` for ``dtype``.
            dual_chunk: tokens in a chunk of dual-chunk attention, or 0. tree: whether drafts may branch.
    """

    kv_heads: int = 2
    ratio: int = 2
    head_size: int = 8
    value_size: int = 8
    block_size: int = 4
    window: int | None = None
    softcap: float = 0.0
    dtype: str = "float32"
    alibi: bool = False
    sinks: bool = False
    chunked: bool = False
    cache_dtype: str = ""
    dual_chunk: int = 0
    tree: bool = False

    @property
    def query_heads(self) -> int:
        """Heads of the queries that a backend gets: with dual-chunk attention each comes rotated three times."""
        return self.heads * (3 if self.dual_chunk else 1)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.ratio

    @property
    def slopes(self) -> list[float]:
        """Slopes of the linear biases of all heads: of different sizes, in no order."""
        return [0.01 * (7 * head % 11 + 1) for head in range(self.heads)]

    @property
    def sink_logits(self) -> list[float]:
        """Logits of the sinks of all heads."""
        return [0.7 * (5 * head % 7) - 2.0 for head in range(self.heads)]

    @property
    def kind(self) -> str:
        """The layer kind."""
        if self.window is None:
            return "full"
        return "chunked_local" if self.chunked else "sliding"

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at ``position`` sees."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.chunked else max(0, position - self.window + 1)

    def request(self, rank: RankInfo = ALONE) -> AttentionRequest:
        """Return what a backend is asked for: all that the layer needs is declared."""
        there = {
            "gqa": self.ratio > 1,
            "softcap": bool(self.softcap),
            "alibi": self.alibi,
            "sinks": self.sinks,
            "diff_kv": self.value_size != self.head_size,
            "dual_chunk": bool(self.dual_chunk),
            "tree": self.tree,
        }
        return AttentionRequest(
            subject=self.kind,
            kind=self.kind,
            needs=PHASES | {name for name, is_there in there.items() if is_there},
            dtype=self.dtype,
            layers=(0,),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            value_head_size=self.value_size,
            scale=self.head_size**-0.5,
            window=self.window,
            softcap=self.softcap,
            cache_dtype=self.cache_dtype or self.dtype,
            rank=rank,
            extra={"chunk_length": self.dual_chunk} if self.dual_chunk else {},
        )


ENCODER = AttentionRequest(
    subject="encoder",
    kind="encoder",
    needs=PHASES,
    dtype="float32",
    layers=(0,),
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    value_head_size=8,
    scale=0.3,
)

LATENT = AttentionRequest(
    subject="mla",
    kind="mla",
    needs=PHASES,
    dtype="float32",
    layers=(0,),
    num_heads=4,
    num_kv_heads=1,
    head_size=12,
    value_head_size=6,
    scale=0.2,
    cache_dtype="float32",
    extra={"latent_size": 16, "rope_size": 4},
)
"""Heads of 8 plain and 4 rotated features over a latent of 16."""
INDEXED = replace(
    LATENT,
    subject="mla_sparse",
    kind="mla_sparse",
    extra={**LATENT.extra, "index_heads": 20, "index_size": 8, "index_topk": 9},
)
"""The same to nine tokens, chosen by so many index heads that no two tokens score alike."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of a layer with a state per sequence.

    Args:
        heads, groups: of values, and of keys (heads that share B and C). key: K, or states of a channel. value: V.
        channels, width: of the short convolution; 0 channels: none.
    """

    heads: int
    groups: int
    key: int
    value: int
    channels: int = 0
    width: int = 4


STATE_SHAPES: Mapping[str, StateShape] = {
    "mamba1": StateShape(heads=6, groups=6, key=5, value=1, channels=6),
    "mamba2": StateShape(heads=4, groups=2, key=5, value=3, channels=32),
    "linear": StateShape(heads=4, groups=4, key=6, value=6),
    "gdn": StateShape(heads=4, groups=2, key=6, value=5, channels=44),
    "kda": StateShape(heads=4, groups=4, key=6, value=5, channels=68),
    "short_conv": StateShape(heads=7, groups=7, key=1, value=1, channels=7, width=3),
}
"""By layer kind."""


def state_request(kind: str) -> AttentionRequest:
    """Return the request for a layer of ``kind``, with its short convolution if it has one."""
    shape = STATE_SHAPES[kind]
    extra: dict[str, Any] = {}
    if shape.channels:
        extra = {"conv_shards": (OutputShard("", shape.channels),), "conv_width": shape.width}
    if kind == "mamba2":
        extra["dt_limit"] = (0.0, 2.0)
    return AttentionRequest(
        subject=kind,
        kind=kind,
        needs=PHASES | ({"gqa"} if shape.groups < shape.heads else set()),
        dtype="float32",
        layers=(0,),
        num_heads=shape.heads,
        num_kv_heads=shape.groups,
        head_size=shape.key,
        value_head_size=shape.value,
        extra=extra,
    )


def attention_samples() -> dict[str, AttentionRequest]:
    """Return one request for each kind of layer, and one for each thing that a layer may have."""
    plain = Shape(head_size=64, value_size=64)
    shapes = {
        "full": replace(plain, ratio=1),
        "grouped heads": plain,
        "sliding": replace(plain, window=7),
        "chunked_local": replace(plain, window=7, chunked=True),
        "softcap": replace(plain, softcap=2.0),
        "alibi": replace(plain, alibi=True),
        "sinks": replace(plain, sinks=True),
        "dual_chunk": replace(plain, dual_chunk=7),
        "tree": replace(plain, tree=True),
        "values of another size": replace(plain, value_size=128),
        "heads of 8": Shape(),
        "heads of 80": replace(plain, head_size=80, value_size=80),
        "heads of 128": replace(plain, head_size=128, value_size=128),
        "heads of 256": replace(plain, head_size=256, value_size=256),
        "bfloat16": replace(plain, dtype="bfloat16"),
        "bfloat16, heads of 128": replace(plain, head_size=128, value_size=128, dtype="bfloat16"),
        "float16": replace(plain, dtype="float16"),
        **{f"{kind} cache": replace(plain, cache_dtype=kind) for kind in ("float8_e4m3fn", "int8")},
    }
    paged = {name: shape.request() for name, shape in shapes.items()}
    states = {kind: state_request(kind) for kind in STATE_SHAPES}
    return {**paged, "encoder": ENCODER, "mla": LATENT, "mla_sparse": INDEXED, **states}
