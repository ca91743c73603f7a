"""The work, in torch. N rows, S experts per row, E width, F inner."""

import torch
import torch.nn.functional as F

from jackfield.interfaces.moe import ExpertMatrices


class Experts:
    """Goes through the experts one by one."""

    def apply(
        self,
        x_NE: torch.Tensor,
        up: ExpertMatrices,
        down: ExpertMatrices,
        weights_NS: torch.Tensor,
        experts_NS: torch.Tensor,
    ) -> torch.Tensor:
        out_NE = torch.zeros_like(x_NE)
        for expert in range(len(up.weight)):
            rows, places = (experts_NS == expert).nonzero(as_tuple=True)
            gate, value = (x_NE[rows] @ up.weight[expert].T).chunk(2, dim=-1)
            result = (F.silu(gate) * value) @ down.weight[expert].T
            out_NE.index_add_(0, rows, result * weights_NS[rows, places].unsqueeze(1).to(x_NE.dtype))
        return out_NE
