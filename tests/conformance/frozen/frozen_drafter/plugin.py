"""Drafts what followed the last token when it was said before. No model, and no import at the top."""

from jackfield.interfaces import Band, DraftBatch, Drafter, DrafterEnv, DrafterRequest, Drafts, Preference


class FrozenDrafter(Drafter):
    """Looks the last token of a sequence up in the sequence itself."""

    name = "frozen_drafter"
    api = (1, 0)
    summary = "Frozen drafter: what followed the last token before"
    kinds = frozenset({"frozen_drafter"})
    needs = frozenset({"tokens"})

    def __init__(self, count: int) -> None:
        self._count = count

    @classmethod
    def preference(cls, request: DrafterRequest) -> Preference:
        return Preference(Band.SUPPORTED, "no model to run")

    @classmethod
    def build(cls, env: DrafterEnv) -> "FrozenDrafter":
        return cls(env.request.num_tokens)

    def propose(self, batch: DraftBatch) -> Drafts:
        import numpy as np

        assert batch.token_ids is not None  # it is a host drafter
        ids = np.full((len(batch.slots), self._count), -1, dtype=np.int64)
        for row, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
            tokens = batch.token_ids[slot, :length]
            found = np.flatnonzero(tokens[:-1] == tokens[-1])
            if len(found):
                draft = tokens[found[-1] + 1 :][: self._count]
                ids[row, : len(draft)] = draft
        return Drafts(ids)
