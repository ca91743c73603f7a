"""``jackfield quantize --format gguf``: what is written is what the gguf package makes of the model's weights, and what
the engine and transformers compute with.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engines import Engine
from gguf_writer import gguf_name, rows_in_halves
from hf import LLAMA3_ROPE, WINDOW, Tiny, assert_equal, assert_logprobs, changed_copy, make_tiny, random_prompts
from text_model import EOS_ID, add_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers import models as bpe
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from jackfield import LLM, SamplingParams
from jackfield.checkpoint import generation_defaults, read_facts
from jackfield.cli import main
from jackfield.tokenizer import load_tokenizer

Kind = gguf.GGMLQuantizationType
TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f16", "bf16", "f32")
PLAIN = ("f16", "bf16", "f32")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama_tied": {"kind": "llama", "tie_word_embeddings": True, "head_dim": 24},
    "llama_biases": {"kind": "llama", "attention_bias": True},
    "llama_rope": {"kind": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_linear": {"kind": "llama", "rope_parameters": LINEAR},
    "llama_odd": {"kind": "llama", "hidden_size": 80, "intermediate_size": 72},
    "mistral": {"kind": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": {"kind": "qwen2"},
    "qwen2_yarn": {"kind": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3": {"kind": "qwen3", "head_dim": 128, "tie_word_embeddings": True},
    "qwen3_untied": {"kind": "qwen3", "head_dim": 16},
}
ARCHES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
CASES = [("llama", type_) for type_ in TYPES] + [(name, "q8_0") for name in MODELS if name != "llama"]
CASES += [("qwen3", "q4_0"), ("llama_odd", "f32"), ("llama_biases", "f32")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
TEXTS = [
    "the quick brown fox isn't here",
    " naïve café 123 déjà vu 12345",
    "日本語 テキスト 😀 emoji",
    "  a  b\n\n c\t",
    "x<end> [tool]y",
    "",
]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """The models that were asked for so far."""
    root = tmp_path_factory.mktemp("dense")
    return {name: make_tiny(root / name, **values) for name, values in MODELS.items()}


def write(source: Path, output: Path, type_: str = "q8_0") -> Path:
    """Write a GGUF file and return it."""
    option = ("--plugins.options.gguf_file.type", type_)
    assert main(["quantize", str(source), "--output", str(output), "--format", "gguf", *option]) == 0
    (made,) = output.iterdir()
    assert made.name == f"{source.name}-{type_}.gguf"
    return made


def expected_kind(name: str, array: np.ndarray[Any, Any], type_: str) -> Kind:
    """Return the type that a parameter should have in the file."""
    if array.ndim == 1:
        return Kind.F32
    ends = name in ("model.embed_tokens.weight", "lm_head.weight")
    kind = Kind.Q8_0 if ends and type_ not in PLAIN else Kind[type_.upper()]
    return Kind.F16 if array.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def meant(tiny: Tiny, type_: str) -> Any:
    """Return the model with the weights that the gguf package makes of its own; rows are quantized one by one, so that
    their order does not matter.
    """
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            array = parameter.numpy()
            kind = expected_kind(name, array, type_)
            made = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
            parameter.copy_(torch.from_numpy(made.copy()))
    return model


def check_tensors(file: Path, tiny: Tiny, reference: Any, kind: str, type_: str) -> None:
    """Hold the tensors of the file against the reference's, row order undone."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    stored.pop("rope_freqs.weight", None)
    own = dict(tiny.model.named_parameters())
    for name, parameter in reference.named_parameters():
        tensor = stored.pop(gguf_name(name))
        assert tensor.tensor_type == expected_kind(name, own[name].detach().numpy(), type_), name
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        array = rows_in_halves(name, array, reference.config, ARCHES[kind])
        assert np.array_equal(array, parameter.detach().numpy()), name
    assert not stored, f"the model has no place for {sorted(stored)}"


@pytest.mark.parametrize(("name", "type_"), CASES)
def test_the_engine_computes_with_what_is_written(
    engine: Engine, sources: dict[str, Tiny], tmp_path: Path, name: str, type_: str
) -> None:
    tiny, reference = sources[name], meant(sources[name], type_)
    file = write(tiny.folder, tmp_path / "made", type_)
    check_tensors(file, tiny, reference, MODELS[name]["kind"], type_)
    prompts = random_prompts((1, 5, 33, 80))
    llm = engine(file.parent)
    assert_equal(reference, prompts, [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)])
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=4)
    assert_logprobs(reference, prompts[2], llm.generate(prompts[2], params)[0].outputs[0], count=4)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mistral", "qwen2", "qwen3"])
def test_transformers_computes_with_what_is_written(sources: dict[str, Tiny], tmp_path: Path, name: str) -> None:
    """It takes files whose name has "mistral" in it for an architecture that it cannot read, and heads of Qwen 3 for
    such of 128 features.
    """
    source = shutil.copytree(sources[name].folder, tmp_path / "source")
    file = write(source, tmp_path / "made", "q8_0")
    read = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    ids = torch.tensor(random_prompts((40,)))
    with torch.no_grad():
        expected = meant(sources[name], "q8_0")(input_ids=ids).logits
        torch.testing.assert_close(read(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def trained(folder: Path, *, template: bool, **tokens: str) -> None:
    """Write a byte-level BPE of some merges into a model folder; ``template``: a BOS begins every text."""
    backend = Backend(bpe.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_special_tokens(["<start>", "<end>"])
    backend.add_tokens(["[tool]"])
    if template:
        ids = [("<start>", backend.token_to_id("<start>"))]
        backend.post_processor = processors.TemplateProcessing(
            single="<start> $A", pair="<start> $A <start>:1 $B:1", special_tokens=ids
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **tokens)
    hf.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    hf.save_pretrained(folder)


@pytest.mark.parametrize("template", [False, True])
def test_the_tokenizer_is_the_same(tmp_path: Path, template: bool) -> None:
    source = make_tiny(tmp_path / "source", "llama", vocab_size=320, num_hidden_layers=1).folder
    trained(source, template=template, bos_token="<start>")
    given = {"eos_token_id": [301, 7], "temperature": 0.5, "top_k": 20, "top_p": 0.75}
    (source / "generation_config.json").write_text(json.dumps(given))
    file = write(source, tmp_path / "made")
    facts = read_facts(file)
    own, read = load_tokenizer(source, read_facts(source)), load_tokenizer(file, facts)
    for text in TEXTS:
        for special in (False, True):
            ids = own.encode(text, add_special_tokens=special)
            assert read.encode(text, add_special_tokens=special) == ids
            assert read.decode(ids, skip_special_tokens=special) == own.decode(ids, skip_special_tokens=special)
    assert own.encode("a")[:1] == [300] if template else own.encode("a")[:1] != [300]
    assert read.bos_token_id == own.bos_token_id == 300
    assert read.eos_token_ids == own.eos_token_ids == {301, 7}
    assert read.special_ids == own.special_ids
    messages = [{"role": "user", "content": "hi"}]
    assert read.apply_chat_template(messages, False) == own.apply_chat_template(messages, False) == "[user]hi<end>"
    assert generation_defaults(facts).sampling == {"temperature": 0.5, "top_k": 20, "top_p": 0.75}
    rows = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    assert rows[302:] == ["[tool]", *(f"[PAD{number}]" for number in range(303, 320))]


def test_text_is_generated_from_a_file(text_model: Tiny, tmp_path: Path) -> None:
    file = write(text_model.folder, tmp_path / "made", "f32")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    said = []
    for path in (text_model.folder, file):
        llm = LLM(str(path), kv_cache_memory="16MiB")
        said.append(llm.generate(["hello", "a b"], params))
        llm.shutdown()
    assert [one.outputs[0].text for one in said[0]] == [one.outputs[0].text for one in said[1]]
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.eos_token_id"].contents() == EOS_ID


def refused(capsys: pytest.CaptureFixture[str], source: Path | str, output: Path, *words: str) -> str:
    """Return what the command says when it refuses, and writes nothing."""
    assert main(["quantize", str(source), "--output", str(output), "--format", "gguf", *words]) == 2
    return capsys.readouterr().err


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mlp_bias": ("llama", {"mlp_bias": True}, "mlp_bias"),
    "hidden_act": ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    "window": ("mistral", {"sliding_window": WINDOW}, "sliding_window"),
    "upper windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None},
        "sliding_window",
    ),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
    "yarn": ("qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}}, "original_max_position"),
    "yarn factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor"),
    "ends": ("llama", {"eos_token_id": [1, 2, 3, 4]}, "eos_token_id"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_the_format_cannot_say_is_refused(
    sources: dict[str, Tiny], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, changes, field = CHANGES[case]
    folder = tmp_path / "changed"
    changed_copy(sources[name].folder, folder, **changes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    said = refused(capsys, folder, tmp_path / "made")
    assert field in said and not (tmp_path / "made").exists()


def test_other_refusals(sources: dict[str, Tiny], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = sources["llama"].folder, tmp_path / "made"
    assert "q3_k" in refused(capsys, source, made, "--plugins.options.gguf_file.type", "q3_k")
    assert "kind" in refused(capsys, source, made, "--plugins.options.gguf_file.kind", "q8_0")
    assert "looks at no text" in refused(capsys, source, made, "--text", str(source / "config.json"))
    made.mkdir()
    (made / "file").write_text("x")
    assert "is not empty" in refused(capsys, source, made)
    (made / "file").unlink()
    written = write(source, made, "f16")
    assert "gguf_file" in refused(capsys, written, tmp_path / "again")
    small = make_tiny(tmp_path / "small", "llama", vocab_size=200, num_hidden_layers=1).folder
    add_tokenizer(small)
    assert "257" in refused(capsys, small, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_numbers_that_half_precision_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = make_tiny(tmp_path / "large", "llama", num_hidden_layers=1)
    with torch.no_grad():
        tiny.model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    tiny.model.save_pretrained(tiny.folder)
    said = refused(capsys, tiny.folder, tmp_path / "made", "--plugins.options.gguf_file.type", "f16")
    assert "plugins.options.gguf_file.type" in said and "up_proj" in said
    assert not any((tmp_path / "made").iterdir())
    assert write(tiny.folder, tmp_path / "made", "bf16").is_file()


def test_an_engine_runs_nothing_with_it(sources: dict[str, Tiny]) -> None:
    from jackfield.errors import ConfigError

    with pytest.raises(ConfigError, match="writes checkpoints and runs none"):
        LLM(str(sources["llama"].folder), skip_tokenizer_init=True, quantization={"force": "gguf_file"})
