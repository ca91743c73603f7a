"""Matrices as bitsandbytes stores them. Legend: O outputs, I inputs, B blocks of 64 numbers of the flattened matrix."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.packing import from_table, unpack_nibbles
from jackfield_quantization.scaled import Grid, ScaledStorage, Typed
from jackfield_quantization.stored import Piece, Storage, Stored
from jackfield_quantization.stored_method import unreadable
from jackfield_quantization.unquantized_scheme import WEIGHT

STATE = "weight.quant_state.bitsandbytes__"
ABSMAX, MAP = "weight.absmax", "weight.quant_map"
NESTED, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
LARGEST_INT8 = 127
MORE_DIGITS = 24
"""By so many letters one number in JSON may be longer than another: the offset of nested scales, in each expert's
description another one.
"""


class FourBitStorage(Storage):
    """``weight`` [O * I / 2, 1] bytes, in whatever type, the first number in the high half; ``absmax`` [B], itself
    numbers of eight bits where it is nested; tables of both; and a description in JSON, as bytes.

    A row is no whole number of blocks, so that each rank reads all and keeps its part.
    """

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        needed = {WEIGHT: "uint8", ABSMAX: "float32", MAP: "float32"}
        if piece.dtype(ABSMAX, "float32") == "uint8":
            needed |= {NESTED: "float32", NESTED_MAP: "float32"}
        specs = [piece.needed(suffix, dtype, opaque=suffix == WEIGHT) for suffix, dtype in needed.items()]
        (length,) = piece.shape(self._state(piece)) or (0,)
        return [*specs, replace(piece.whole(self._state(piece), "uint8", (length + MORE_DIGITS,)), text=True)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        state = self._description(piece, stored)
        shape = tuple(state["shape"])
        if shape != (piece.shard.size, piece.info.input_size):
            detail = f"its stored shape is {list(shape)}, not {[piece.shard.size, piece.info.input_size]}"
            raise unreadable(piece.info, piece.label, detail)
        # Trainers that cut parameters among ranks keep bytes as numbers of the type that they compute in.
        codes = unpack_nibbles(stored[WEIGHT].flatten().view(torch.uint8), high_first=True)
        scales = self._scales(stored, state).repeat_interleave(int(state["blocksize"]))
        count = piece.shard.size * piece.info.input_size
        wide = (from_table(codes[:count], stored[MAP]) * scales[:count]).view(shape)
        (first, last), (start, stop) = piece.rows, piece.columns
        return wide[first:last, start:stop]

    def _scales(self, stored: Stored, state: Mapping[str, Any]) -> torch.Tensor:
        """Return the largest magnitude of each block, float32 [B]."""
        if NESTED not in stored:
            return stored[ABSMAX].float()
        fine = from_table(stored[ABSMAX], stored[NESTED_MAP])
        coarse = stored[NESTED].float().repeat_interleave(int(state["nested_blocksize"]))[: len(fine)]
        return fine * coarse + float(state["nested_offset"])

    def _state(self, piece: Piece) -> str:
        found = [suffix for suffix in piece.facts if suffix.startswith(STATE)]
        if not found:
            raise unreadable(piece.info, piece.label, f"the checkpoint lacks '{STATE}nf4' or its like")
        return found[0]

    def _description(self, piece: Piece, stored: Stored) -> Mapping[str, Any]:
        text = bytes(stored[self._state(piece)].flatten().tolist())
        try:
            found: Mapping[str, Any] = json.loads(text)
        except ValueError:
            raise unreadable(piece.info, piece.label, "its quant_state is no JSON") from None
        lacking = {"shape", "blocksize"} - found.keys()
        if NESTED in stored:
            lacking |= {"nested_blocksize", "nested_offset"} - found.keys()
        if lacking:
            raise unreadable(piece.info, piece.label, f"its quant_state lacks {', '.join(sorted(lacking))}")
        return found


def eight_bits() -> ScaledStorage:
    """Return the storage of LLM.int8() (arXiv:2208.07339): ``weight`` int8 [O, I], ``SCB`` float32 [O], the largest
    magnitude of each output.
    """
    return ScaledStorage(Typed("int8"), Grid(("SCB",)), constant=1 / LARGEST_INT8, unused=("weight_format",))
