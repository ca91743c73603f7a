"""What embeddings are used for: scores of pairs. Legend: A texts on one side, B on the other, E width."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jackfield.engine.outputs import PoolingOutput, RequestOutput
from jackfield.errors import RequestError

Floats = npt.NDArray[np.float32]


def pooling_output(output: RequestOutput) -> PoolingOutput:
    """Return the result of a pooling request that is over.

    Raises:
        RequestError: it ended without one.
    """
    if output.pooled is None:
        completion = output.outputs[0]
        raise RequestError(
            f"the request ended without a result: {completion.error or completion.finish_reason}",
            field="request_id",
            value=output.request_id,
        )
    return PoolingOutput(output.request_id, output.prompt_token_ids, output.pooled, output.num_cached_tokens)


def cosine(left_E: Floats, right_E: Floats) -> float:
    """Return the cosine of the angle between two embeddings; 0 where one has no length."""
    length = float(np.linalg.norm(left_E) * np.linalg.norm(right_E))
    return float(left_E @ right_E) / length if length else 0.0


def max_similarity(query_AE: Floats, document_BE: Floats) -> float:
    """Return the late-interaction score of token embeddings: the sum over query tokens of the best match in the
    document (ColBERT, arXiv:2004.12832, equation 3).
    """
    return float((query_AE @ document_BE.T).max(axis=1).sum())


def similarity(one: Floats, other: Floats) -> float:
    """Return the score of two texts: of one vector each, or of one for each of their tokens."""
    return cosine(one, other) if one.ndim == 1 else max_similarity(one, other)
