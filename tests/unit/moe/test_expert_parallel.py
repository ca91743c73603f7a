"""Two and four ranks with some of the experts each give what one process with all of them gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_ranks import CONFIGS, TOKENS, rows
from expert_world import build

from jackfield.errors import ConfigError
from jackfield.interfaces import RankInfo
from jackfield.layers.dispatch import Placement

HERE = Path(__file__).parent


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_what_one_process_gives(size: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, str(HERE / "expert_ranks.py"), str(size), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for name, config in CONFIGS.items():
        whole = build(config)
        for kind in ("linear", "round_robin"):
            for case, counts in enumerate(TOKENS[size]):
                for rank, count in enumerate(counts):
                    found = results[rank][f"{kind} {name} {case}"]
                    assert found.shape == (count, 8)
                    torch.testing.assert_close(found, whole(*rows(count, rank)), rtol=1e-5, atol=1e-5)
            for rank in range(size):
                found = results[rank][f"{kind} {name} masked"]
                torch.testing.assert_close(found, whole(*rows(6, 0)), rtol=1e-5, atol=1e-5)


def test_placements() -> None:
    assert Placement(7, RankInfo(0, 3)).owners() == [0, 0, 0, 1, 1, 2, 2]
    assert Placement(7, RankInfo(1, 3)).held() == {3: 0, 4: 1}
    dealt = Placement(7, RankInfo(1, 3), "round_robin")
    assert dealt.owners() == [0, 1, 2, 0, 1, 2, 0]
    assert dealt.places() == [0, 0, 0, 1, 1, 1, 2]
    assert dealt.held() == {1: 0, 4: 1}


def test_a_placement_that_nobody_knows() -> None:
    with pytest.raises(ConfigError) as caught:
        Placement(4, kind="random")
    assert (caught.value.field, caught.value.value) == ("placement", "random")
