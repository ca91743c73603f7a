from __future__ import annotations

from pathlib import Path

import pytest

from jackfield.cli.flags import extract, flag_names
from jackfield.config.schema import leaves
from jackfield.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "rest", "settings"),
    [
        ("m --max-model-len 128 p", ["m", "p"], {"max_model_len": "128"}),
        ("m --max-model-len=128", ["m"], {"max_model_len": "128"}),
        ("--no-enable-prefix-caching m", ["m"], {"enable_prefix_caching": False}),
        ("--enable-prefix-caching m", ["m"], {"enable_prefix_caching": True}),
        ("--enable-prefix-caching false m", ["m"], {"enable_prefix_caching": "false"}),
        ("--enable-prefix-caching=off", [], {"enable_prefix_caching": "off"}),
        ("--attention.kinds.sliding.force X", [], {"attention.kinds.sliding.force": "X"}),
        ("--attention.prefer a --attention.prefer b,c", [], {"attention.prefer": "a,b,c"}),
        ("--quantization gguf", [], {"quantization": "gguf"}),
        ("--kv-cache-dtype float16", [], {"kv_cache_dtype": "float16"}),
        ("--plugins.options.rocket.fuel -3", [], {"plugins.options.rocket.fuel": "-3"}),
        ("--seed 1 --seed 2", [], {"seed": "2"}),
        ("--model m --temperature 1", ["--model", "m", "--temperature", "1"], {}),
        ("m -- --seed 1", ["m", "--", "--seed", "1"], {}),
        ("--max-model-le 3", ["--max-model-le", "3"], {}),
        ("--no-seed", ["--no-seed"], {}),
    ],
)
def test_engine_flags_are_taken_out(line: str, rest: list[str], settings: dict[str, object]) -> None:
    left, flags = extract(line.split())
    assert (left, flags.settings) == (rest, settings)


def test_the_configuration_file_is_a_flag() -> None:
    assert extract(["--config", "a.yaml"])[1].file == extract(["--config=a.yaml"])[1].file == Path("a.yaml")


@pytest.mark.parametrize("line", ["--seed", "--seed --dtype float32"])
def test_a_flag_needs_its_value(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        extract(line.split())
    assert str(caught.value) == "--seed needs a value\n  field: --seed = None\n  remedy: write --seed VALUE"


def test_every_setting_but_the_model_has_a_flag_that_sets_it() -> None:
    names = set(flag_names())
    for leaf in leaves():
        flag = "--" + (leaf.flat or ".".join(leaf.path)).replace("_", "-")
        if leaf.path != ("model", "model"):
            assert {flag, f"{flag}.NAME"} & names, flag
            assert extract([flag, "0"])[1].settings, flag
