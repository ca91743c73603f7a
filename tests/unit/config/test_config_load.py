from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackfield.config import EngineConfig, Origin, Selection, load_config, require_model
from jackfield.errors import ConfigError


def load(**api: Any) -> EngineConfig:
    return load_config(env={}, api=api)


def write(folder: Path, text: str) -> Path:
    path = folder / "jackfield.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def fault(**kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, **kwargs})
    return caught.value


def test_command_line_wins_over_arguments_over_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 2\nblock_size: 2\nmax_num_seqs: 2\n")
    config = load_config(
        api={"seed": 1, "max_model_len": 1},
        file=file,
        env={"JACKFIELD_MODEL__SEED": "3", "JACKFIELD_CACHE__BLOCK_SIZE": "3"},
        cli={"seed": "4"},
    )
    fields = ("model.seed", "cache.block_size", "scheduler.max_num_seqs", "model.max_model_len")
    assert [config.get(field) for field in fields] == [4, 3, 2, 1]
    assert [str(config.origin(field)) for field in fields] == [
        "cli: --seed",
        "env: JACKFIELD_CACHE__BLOCK_SIZE",
        f"file: {file}:3",
        "api: max_model_len",
    ]


def test_defaults_are_not_user_set() -> None:
    config = load(block_size=8)
    assert config.origin("cache.num_blocks") == Origin("default")
    assert (config.is_user_set("cache.num_blocks"), config.is_user_set("cache.block_size")) == (False, True)
    assert config.is_user_set("cache")
    assert not config.is_user_set("scheduler")


def test_nested_and_dotted_keys_of_a_file_mean_the_same(tmp_path: Path) -> None:
    nested = load_config(env={}, file=write(tmp_path, "attention:\n  kinds:\n    sliding:\n      force: a\n"))
    dotted = load_config(env={}, file=write(tmp_path, "attention.kinds.sliding.force: a\n"))
    assert nested.attention == dotted.attention == Selection(kinds={"sliding": Selection(force="a")})
    assert nested.origin("attention.kinds.sliding.force").where.endswith("jackfield.yaml:4")
    assert dotted.origin("attention.kinds.sliding.force").where.endswith("jackfield.yaml:1")


def test_a_text_for_a_selection_forces_that_plugin() -> None:
    config = load(attention="flashinfer", quantization="gguf", ops={"kinds": {"rotary": "torch"}})
    assert config.attention == Selection(force="flashinfer")
    assert config.quantization.force == "gguf"
    assert config.ops.kinds["rotary"].force == "torch"
    assert config.origin("attention.force") == Origin("api", "attention")


def test_model_is_a_text_or_a_section() -> None:
    assert load(model="a").model.model == load(model={"model": "a"}).model.model == "a"


@pytest.mark.parametrize(
    ("name", "path", "force"),
    [
        ("attention.layers.model.layers.*.attn.force", "model.layers.3.attn", "x"),
        ("attention.layers.*.attn", "model.layers.3.attn", "x"),
        ("attention.layers.0-7.phases.decode.force", "", "x"),
    ],
)
def test_layer_patterns_may_contain_dots(name: str, path: str, force: str) -> None:
    config = load_config(env={}, cli={name: force})
    word = config.attention.resolve(layer=3, path=path, phase="decode")
    assert word.force == force
    assert config.origin(f"attention.{word.force_from}").source == "cli"


def test_maps_of_several_sources_are_merged_by_key(tmp_path: Path) -> None:
    config = load_config(
        env={},
        file=write(tmp_path, "plugins: {options: {rocket: {fuel: 1, stages: 2}}}\n"),
        cli={"plugins.options.rocket.fuel": "3", "hf-overrides": '{"rope": {"factor": 2}}'},
    )
    assert config.plugin_options("rocket") == {"fuel": 3, "stages": 2}
    assert config.plugin_options("absent") == {}
    assert config.model.hf_overrides == {"rope": {"factor": 2}}


def test_dotted_keys_below_free_maps_stay_whole() -> None:
    config = load_config(env={}, cli={"plugins.override.ops.torch": "acme", "hf_overrides.a.b": "1"})
    assert config.plugins.override == {"ops.torch": "acme"}
    assert config.model.hf_overrides == {"a.b": 1}


@pytest.mark.parametrize("text", ["false", "False", "no", "off", "0"])
def test_false_stays_false_from_every_source(tmp_path: Path, text: str) -> None:
    loads = (
        load_config(env={"JACKFIELD_CACHE__ENABLE_PREFIX_CACHING": text}),
        load_config(env={}, cli={"enable-prefix-caching": text}),
        load_config(env={}, file=write(tmp_path, f"enable_prefix_caching: {text}\n")),
    )
    for config in loads:
        assert config.cache.enable_prefix_caching is False
        assert config.is_user_set("cache.enable_prefix_caching")


def test_async_scheduling_has_three_states() -> None:
    assert load().scheduler.async_scheduling is None
    assert load(async_scheduling=False).scheduler.async_scheduling is False
    unset = load_config(env={}, cli={"async-scheduling": "null"})
    assert unset.scheduler.async_scheduling is None
    assert unset.is_user_set("scheduler.async_scheduling")


def test_lists_are_commas_or_lists() -> None:
    assert load_config(env={}, cli={"attention.prefer": "a, b"}).attention.prefer == ("a", "b")
    assert load(attention={"prefer": ["a", "b"]}).attention.prefer == ("a", "b")


@pytest.mark.parametrize(
    ("text", "count"), [("4GiB", 4 << 30), ("4g", 4 << 30), ("1.5 GB", 1_500_000_000), ("1000", 1000), (1000, 1000)]
)
def test_sizes(text: object, count: int) -> None:
    assert load(kv_cache_memory=text).cache.kv_cache_memory == count


def test_unknown_key_of_a_file_names_line_suggestion_and_section(tmp_path: Path) -> None:
    file = write(tmp_path, "model: m\ncache:\n  blok_size: 3\n")
    error = fault(file=file)
    assert error.message == f"'cache' has no setting 'blok_size' (file: {file}:3)"
    assert (error.field, error.value) == ("cache.blok_size", 3)
    assert error.remedy == (
        "did you mean 'block_size'? settings of 'cache': block_size, num_blocks, cache_dtype, layer_dtypes, "
        "kv_cache_memory, gpu_memory_utilization, enable_prefix_caching, kv_events"
    )


def test_a_key_in_the_wrong_section_names_the_right_one() -> None:
    assert "did you mean 'model.max_model_len'?" in fault(api={"cache": {"max_model_len": 1}}).remedy


def test_unknown_argument_has_a_suggestion() -> None:
    error = fault(api={"max_model_length": 3})
    assert error.message == "there is no setting 'max_model_length' (api: max_model_length)"
    assert error.remedy == "did you mean 'max_model_len'?"


def test_all_offenders_are_listed() -> None:
    error = fault(api={"dtype": "int8", "block_size": "many", "gpu_memory_utilization": 0})
    assert str(error).splitlines() == [
        "3 settings are wrong:",
        "  - model.dtype cannot be 'int8': input should be 'auto', 'float32', 'bfloat16' or 'float16' (api: dtype); "
        "give: auto | float32 | bfloat16 | float16",
        "  - cache.block_size cannot be 'many': input should be a valid integer, unable to parse string as an integer "
        "(api: block_size); give: integer",
        "  - cache.gpu_memory_utilization cannot be 0: input should be greater than 0 (api: gpu_memory_utilization); "
        "give: number",
        "  field: model.dtype = 'int8'",
        "  remedy: give: auto | float32 | bfloat16 | float16",
    ]


@pytest.mark.parametrize(
    ("api", "message"),
    [
        ({"max_num_seqs": True}, "scheduler.max_num_seqs cannot be True: a number is needed, not true or false"),
        ({"cache": 3}, "'cache' takes a map of names to values, not 3"),
        ({"model": {"model": {"x": 1}}}, "model.model cannot be {'x': 1}: input should be a valid string"),
        ({"kv_cache_memory": "4 lumps"}, "cache.kv_cache_memory cannot be '4 lumps': a size is a number of bytes"),
        (
            {"block_size": 1, "cache": {"block_size": 2}},
            "cache.block_size is set twice, to 1 (api: block_size) and to 2",
        ),
        ({"cache.block_size.x": 1}, "'cache.block_size' holds one value and has no part 'x'"),
        ({"tensor_parallel_size": 2}, "parallel.tensor_parallel_size = 2: there is no executor for it yet"),
        ({"pipeline_parallel_size": 2}, "parallel.pipeline_parallel_size = 2: there is no executor for it yet"),
        ({"trust_remote_code": True}, "code that comes with a checkpoint cannot be run yet"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "a step of 4 tokens cannot hold 8 sequences"),
        ({"num_speculative_tokens": 3}, "speculative.num_speculative_tokens does nothing without a method"),
    ],
)
def test_wrong_values(api: dict[str, Any], message: str) -> None:
    assert fault(api=api).message.startswith(message)


def test_unknown_variables_are_errors() -> None:
    error = fault(env={"JACKFIELD_CACHE__BLOK_SIZE": "1"})
    assert error.message.startswith("the environment variable JACKFIELD_CACHE__BLOK_SIZE is not a setting")
    assert error.remedy.startswith("did you mean 'JACKFIELD_CACHE__BLOCK_SIZE'")
    assert fault(env={"JACKFIELD_SEED": "1"}).remedy == "did you mean 'JACKFIELD_MODEL__SEED'?"


def test_variables_name_the_file_and_the_model_cache(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 5\n")
    config = load_config(env={"JACKFIELD_CONFIG": str(file), "JACKFIELD_CACHE": "/models", "PATH": "/bin"})
    assert (config.model.seed, config.model.download_dir) == (5, "/models")
    assert str(config.origin("model.download_dir")) == "env: JACKFIELD_CACHE"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must hold a map of settings"),
        ("a: [\n", "is not YAML"),
        ("seed: 1\nseed: 2\n", "'seed' occurs twice in one map"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    assert message in fault(file=write(tmp_path, text)).message


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    error = fault(file=tmp_path / "absent.yaml")
    assert error.message == "cannot read the configuration file: No such file or directory"
    assert error.value == str(tmp_path / "absent.yaml")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_config(env={}, file=write(tmp_path, "")) == load()


def test_an_engine_needs_a_model() -> None:
    assert require_model(load(model="m")) == "m"
    with pytest.raises(ConfigError, match="no model is set"):
        require_model(load())
