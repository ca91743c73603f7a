from __future__ import annotations

from jackfield.config import Row, load_config, show
from jackfield.config.reference import render_reference
from jackfield.config.schema import leaves


def test_show_has_one_row_for_each_value_with_its_origin() -> None:
    api = {"block_size": 8, "attention": {"kinds": {"full": "a"}}, "generation": {"top_k": 3}}
    config = load_config(env={}, api={**api, "plugins": {"options": {"p": {"q": 1}}}})
    rows = {row.field: row for row in show(config)}
    assert rows["cache.block_size"] == Row("cache.block_size", 8, "api: block_size")
    assert rows["attention.kinds.full.force"] == Row("attention.kinds.full.force", "a", "api: attention")
    assert rows["generation.top_k"].value == 3
    assert rows["plugins.options.p.q"].origin == "api: plugins"
    assert rows["cache.num_blocks"] == Row("cache.num_blocks", None, "default")
    assert "attention.kinds.full.prefer" not in rows


def test_show_without_origins() -> None:
    assert {row.origin for row in show(load_config(env={}), origin=False)} == {""}


def test_every_setting_has_help() -> None:
    assert [leaf.path for leaf in leaves() if not leaf.help] == []


def test_the_reference_names_every_setting() -> None:
    text = render_reference()
    assert [leaf.path for leaf in leaves() if f"`{'.'.join(leaf.path)}`" not in text] == []
    assert "`JACKFIELD_CACHE__BLOCK_SIZE`" in text
