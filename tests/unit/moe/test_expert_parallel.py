"""Which rank holds which experts."""

from __future__ import annotations

import pytest

from jackfield.errors import ConfigError
from jackfield.interfaces import RankInfo
from jackfield.layers.dispatch import Placement


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
