"""Two and four ranks with some of the experts each give what one process with all of them gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import expert_world
import pytest
import torch
from expert_ranks import CONFIGS, TOKENS, rows

HERE = Path(__file__).parent
FOLDERS = os.pathsep.join((str(HERE), str(Path(expert_world.__file__).parent)))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_what_one_process_gives(size: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": FOLDERS}
    command = [sys.executable, str(HERE / "expert_ranks.py"), str(size), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for name, config in CONFIGS.items():
        whole = expert_world.build(config)
        for kind in ("linear", "round_robin"):
            for case, counts in enumerate(TOKENS[size]):
                for rank, count in enumerate(counts):
                    found = results[rank][f"{kind} {name} {case}"]
                    assert found.shape == (count, 8)
                    torch.testing.assert_close(found, whole(*rows(count, rank)), rtol=1e-5, atol=1e-5)
            for rank in range(size):
                found = results[rank][f"{kind} {name} masked"]
                torch.testing.assert_close(found, whole(*rows(6, 0)), rtol=1e-5, atol=1e-5)
