"""Keeps tokens away that a request names in ``extra_args["frozen_logits"]``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jackfield.errors import RequestError
from jackfield.interfaces import LogitsEnv, LogitsProcessor, LogitsRow, ParamsView

if TYPE_CHECKING:
    import torch


class FrozenLogits(LogitsProcessor):
    """Sets the logits of named tokens to minus infinity."""

    name = "frozen_logits"
    api = (1, 0)
    summary = "Frozen logits: keeps tokens away"

    @classmethod
    def wants(cls, params: ParamsView) -> bool:
        ids = (params.extra_args or {}).get("frozen_logits")
        if ids is None:
            return False
        if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise RequestError(
                "these are no token ids", field="extra_args.frozen_logits", value=ids, remedy="give a list of integers"
            )
        return True

    @classmethod
    def build(cls, env: LogitsEnv) -> "FrozenLogits":
        return cls()

    def apply(self, logits_RV: "torch.Tensor", rows: Sequence[LogitsRow]) -> None:
        for index, row in enumerate(rows):
            logits_RV[index, row.extra_args["frozen_logits"]] = float("-inf")
