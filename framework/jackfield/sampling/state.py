"""Sampling parameters of running sequences, as arrays by slot.

Numbers that every row needs are tensors on the device. What few requests use (biases, allow lists, bad words) is kept
per slot and costs nothing when unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DrawBatch
from jackfield.protocol import NewSequence, SamplingParams

LARGEST = float(np.finfo(np.float32).max)
"""Larger parameters count as this one: they would be infinite in float32."""
NUMBERS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@dataclass(slots=True)
class SlotExtras:
    """What only some requests use.

    Args:
        params: all of them. stop_ids: ids that min_tokens suppresses. bad_words: token sequences that must not be
            completed. processors: names of the logits processors that want it.
    """

    params: SamplingParams
    prompt_length: int
    stop_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    processors: tuple[str, ...] = ()
    request_id: str = ""


class SamplingState:
    """Parameters of all slots.

    Args:
        slots: number of slots. device: of the tensors.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self.numbers = {name: torch.zeros(slots, dtype=torch.float32, device=device) for name in NUMBERS}
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.extras: dict[int, SlotExtras] = {}
        self.failures: dict[int, str] = {}
        """Slots whose request cannot go on, with the reason."""
        # Host copies decide which passes a step needs, without asking the device.
        self.host = {name: np.zeros(slots, dtype=np.float32) for name in NUMBERS}
        self.host_top_k = np.zeros(slots, dtype=np.int64)
        self.host_seeds = np.zeros(slots, dtype=np.int64)
        self.greedy = np.ones(slots, dtype=np.bool_)
        self.edits = np.zeros(slots, dtype=np.bool_)
        """Any change of logits."""
        self.single_edits = np.zeros(slots, dtype=np.bool_)
        """Changes that are made row by row."""
        self.penalized = np.zeros(slots, dtype=np.bool_)
        self.prompts = np.zeros(slots, dtype=np.int64)
        self.processed = np.zeros(slots, dtype=np.bool_)
        self._drew = np.zeros(slots, dtype=np.bool_)
        self.logprobs = np.full(slots, -2, dtype=np.int64)
        self.prompt_logprobs = np.full(slots, -2, dtype=np.int64)

    def fill(self, new: Sequence[NewSequence]) -> None:
        """Take sequences' parameters into their slots."""
        if not new:
            return
        for one in new:
            self._fill_host(one)
        slots = np.array([one.slot for one in new])
        draws = ~self.greedy[slots]
        # A greedy slot's numbers say so already, unless one that draws had it before.
        changed = slots[draws | self._drew[slots]]
        self._drew[slots] = draws
        if len(changed):
            self._send_numbers(changed)

    def _send_numbers(self, slots: npt.NDArray[np.int64]) -> None:
        """Write slots' numbers to the device, in two transfers."""
        whole = self._send(np.stack((slots, self.host_top_k[slots], self.host_seeds[slots])))
        numbers = self._send(np.stack([self.host[name][slots] for name in NUMBERS]))
        for name, values in zip(NUMBERS, numbers, strict=True):
            self.numbers[name][whole[0]] = values
        self.top_k[whole[0]] = whole[1]
        self.seeds[whole[0]] = whole[2]

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        # From ordinary memory the host would wait for the copy.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _fill_host(self, new: NewSequence) -> None:
        slot, params = new.slot, new.params
        values = {
            "temperature": 0.0 if params.is_greedy else params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": params.repetition_penalty,
        }
        for name, number in values.items():
            self.host[name][slot] = min(number, LARGEST)
        self.host_top_k[slot] = params.top_k
        self.host_seeds[slot] = new.seed
        self.greedy[slot] = params.is_greedy
        self.logprobs[slot] = -2 if params.logprobs is None else params.logprobs
        wanted = None if new.prompt_scored else params.prompt_logprobs
        self.prompt_logprobs[slot] = -2 if wanted is None else wanted
        self.extras[slot] = extras = SlotExtras(
            params,
            new.prompt_length,
            list(new.eos_token_ids),
            list(new.bad_words),
            tuple(new.processors),
            new.request_id,
        )
        self.processed[slot] = bool(extras.processors)
        self.prompts[slot] = new.prompt_length
        self.single_edits[slot] = _edits_singly(extras)
        self.penalized[slot] = _penalizes(params)
        self.edits[slot] = self.single_edits[slot] or self.penalized[slot] or self.processed[slot]

    def batch(
        self, slots: npt.NDArray[np.int32], slots_device: torch.Tensor, positions: npt.NDArray[np.int32]
    ) -> DrawBatch:
        """Return what is needed to draw for some rows.

        Args:
            slots: [R]. slots_device: the same on the device, int64. positions: [R] of the tokens to draw.
        """
        return DrawBatch(
            slots,
            slots_device,
            positions,
            self.numbers,
            self.top_k,
            self.seeds,
            self.host,
            self.host_top_k,
            self.greedy,
        )

    def plain_greedy(self, slots: npt.NDArray[np.int32]) -> bool:
        """Return whether all of these sequences take the largest logit as it is, and want nothing else."""
        wanted = self.greedy[slots] & ~self.edits[slots] & (self.logprobs[slots] == -2)
        return bool(wanted.all())

    def take_failures(self) -> dict[int, str] | None:
        """Return the slots that failed since the last call."""
        taken, self.failures = self.failures, {}
        return taken or None

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self.extras.pop(slot, None)
        self.failures.pop(slot, None)
        self.edits[slot] = self.single_edits[slot] = self.penalized[slot] = self.processed[slot] = False
        self.greedy[slot] = True
        self.logprobs[slot] = -2
        self.prompt_logprobs[slot] = -2


def _edits_singly(extras: SlotExtras) -> bool:
    params = extras.params
    return bool(params.logit_bias or params.allowed_token_ids or extras.bad_words or params.min_tokens)


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
