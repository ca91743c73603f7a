"""Reports about other engines, as tests of this one: stop strings, log probabilities, limits, text.

A test is named after its report in a public tracker, which the docstring cites; each shows what is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from hf import Tiny, random_prompts
from scripted import START, make_scripted
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers

from jackfield import LLM, SamplingParams
from jackfield.errors import RequestError
from jackfield.protocol import OutputKind
from jackfield.tokenizer import IncrementalDetokenizer, load_tokenizer

PROMPT = {"prompt_token_ids": [START]}


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def say(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Any:
    """Return a function that starts an engine which says a text."""

    def start(text: str | bytes, **settings: Any) -> LLM:
        tiny = make_scripted(tmp_path / "scripted", text)
        return engine(tiny.folder, skip_tokenizer_init=False, async_scheduling=request.param, **settings)

    return start


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **changes})


def one(llm: LLM, prompt: Any = PROMPT, **changes: Any) -> Any:
    return llm.generate(prompt, greedy(**changes))[0].outputs[0]


def deltas(llm: LLM, prompt: Any = PROMPT, **changes: Any) -> list[Any]:
    params = greedy(output_kind=OutputKind.DELTA, **changes)
    return [output.outputs[0] for output in llm.stream(prompt, params)]


def test_a3_a_long_stop_string_ends_stream_and_answer_alike(say: Any) -> None:
    """vllm-project/vllm#2577: the stop text was left in the stream."""
    llm = say("Q=\nObservation:7")
    whole, parts = one(llm, stop=["\nObservation:"]), deltas(llm, stop=["\nObservation:"])
    assert whole.text == "".join(part.text for part in parts) == "Q="
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "\nObservation:")
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == ("stop", "\nObservation:")


def test_a7_what_was_held_back_for_a_stop_string_is_told_at_the_end(say: Any) -> None:
    """vllm-project/vllm#8468: the tail that might have become a stop string was lost."""
    parts = deltas(say("abcdefgh"), stop=["defghi", "fgz"], max_tokens=6)
    assert "".join(part.text for part in parts) == "abcdef"
    assert "".join(part.text for part in parts[:-1]) == "abc", "def may become a stop string"
    assert parts[-1].finish_reason == "length"


def test_a11_a_stop_string_is_no_part_of_the_text(say: Any) -> None:
    """huggingface/text-generation-inference#1724: the stop text was kept."""
    llm = say("1 23456789")
    assert one(llm, stop=["5"]).text == "1 234"
    assert one(llm, stop=["5"], include_stop_str_in_output=True).text == "1 2345"


def test_a13_a_users_stops_do_not_replace_the_models_own(say: Any) -> None:
    """ollama/ollama#4524: with a stop string of the user the model's end of turn no longer ended."""
    completion = one(say("over"), stop=["never"], stop_token_ids=[77])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("over", "stop", None)


def test_b20_long_prompts_with_scores_at_once_and_a_wrong_one_among_them(engine: Engine, text_model: Tiny) -> None:
    """vllm-project/vllm#5890: one such request took the engine down."""
    llm = engine(text_model.folder, max_num_batched_tokens=50)
    prompts = random_prompts([400, 300, 200, 1, 90])
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([*prompts, [1, 260]], params)
    for ids, output in zip(prompts, llm.generate(prompts, params), strict=True):
        first, *rest = output.prompt_logprobs or []
        assert first is None and len(rest) == len(ids) - 1
        for token, entry in zip(ids[1:], rest, strict=True):
            assert entry is not None and token in entry and 5 <= len(entry) <= 6


def test_b24_every_token_of_a_character_has_its_own_bytes(say: Any) -> None:
    """ggml-org/llama.cpp#18454: bytes were those of the replacement character."""
    llm = say("\U0001f600!")
    completion, pieces = one(llm, logprobs=0), llm.get_tokenizer().pieces
    assert completion.text == "\U0001f600!"
    assert b"".join(pieces.bytes_of(token) for token in completion.token_ids[:-1]) == "\U0001f600!".encode()
    texts = [e[t].decoded_token for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert texts == ["\ufffd"] * 4 + ["!", "<end>"]


def test_c35_a_prompt_that_fits_is_answered_as_far_as_the_context_goes(engine: Engine, text_model: Tiny) -> None:
    """vllm-project/vllm#33418: a prompt that fits was blamed for max_tokens, or the engine crashed."""
    llm = engine(text_model.folder, max_model_len=40)
    for length in (10, 39):
        completion = one(llm, random_prompts((length,)), max_tokens=100, ignore_eos=True)
        assert (len(completion.token_ids), completion.finish_reason) == (40 - length, "length")
    with pytest.raises(RequestError) as caught:
        one(llm, random_prompts((40,)), max_tokens=1)
    assert caught.value.message == (
        "the prompt has 40 tokens, but the context holds 40 tokens with at least one of output"
    )
    assert caught.value.remedy == "shorten the prompt to 39 tokens or less, or raise max_model_len"


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": []}, [[]], {"prompt": ""}])
def test_c35_an_empty_prompt_is_refused(engine: Engine, text_model: Tiny, prompt: Any) -> None:
    """vllm-project/vllm#13067: an error inside the engine instead of one about the request."""
    llm = engine(text_model.folder, skip_tokenizer_init=False)
    with pytest.raises(RequestError) as caught:
        one(llm, prompt)
    assert (caught.value.message, caught.value.field) == ("the prompt is empty", "prompt")
    assert llm.generate([]) == []


def test_c37_no_limit_means_what_is_left_of_the_context(engine: Engine, text_model: Tiny) -> None:
    """vllm-project/vllm#6707: without max_tokens the engine crashed."""
    llm = engine(text_model.folder, max_model_len=30)
    assert len(one(llm, random_prompts((7,)), max_tokens=None, ignore_eos=True).token_ids) == 23


def test_c39_scores_of_the_whole_vocabulary_never_need_prompt_times_vocabulary(
    engine: Engine, text_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """local-inference-lab/vllm#264: prompt_logprobs=-1 allocated prompt × vocabulary."""
    llm = engine(text_model.folder)
    executor: Any = llm._core._executor
    model, rows = executor.worker._runner._parts.model, list[int]()
    logits = model.logits

    def counted(hidden: Any) -> Any:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(model, "logits", counted)
    output = llm.generate(random_prompts((400,)), greedy(max_tokens=1, prompt_logprobs=-1))[0]
    assert [len(entry or ()) for entry in output.prompt_logprobs or []] == [0, *[260] * 399]
    assert max(rows) <= 64 and sum(rows) == 400


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"AI": -100}, "logit_bias must be a map from token ids to numbers"),
        ({5: float("nan")}, "logit_bias must be a map from token ids to numbers"),
        ({5: "much"}, "logit_bias must be a map from token ids to numbers"),
        ({260: 1.0}, "logit_bias has token ids outside the vocabulary"),
    ],
)
def test_c43_a_wrong_bias_fails_alone(engine: Engine, text_model: Tiny, bias: Any, message: str) -> None:
    """vllm-project/vllm#5963: an error inside the engine loop, and a dead server."""
    llm = engine(text_model.folder)
    with pytest.raises(RequestError) as caught:
        one(llm, random_prompts((4,)), logit_bias=bias)
    assert (caught.value.message, caught.value.field) == (message, "sampling_params.logit_bias")
    assert len(one(llm, random_prompts((4,)), max_tokens=2, ignore_eos=True).token_ids) == 2


def test_c45_top_k_of_all_and_beyond(engine: Engine, text_model: Tiny) -> None:
    """torch-spyre/sendnn-inference#542: top_k above the vocabulary was an index error in the sampler."""
    llm = engine(text_model.folder)
    answers = [
        one(llm, random_prompts((4,)), temperature=1.0, seed=3, top_k=top_k, max_tokens=20, ignore_eos=True).token_ids
        for top_k in (0, -1, 260, 261, 9_999_999)
    ]
    assert answers == [answers[0]] * 5
    with pytest.raises(RequestError) as caught:
        greedy(top_k=-2)
    assert caught.value.message == "top_k must be 0 or -1 (off) or a positive whole number"


def test_d49_a_prompt_that_ends_within_a_character_is_not_told_again(say: Any) -> None:
    """vllm-project/vllm#48853: the first delta held the whole prompt."""
    character = "漢".encode()
    llm = say(character + b"ab")
    prompt = {"prompt_token_ids": [*b"Hello ", *character[:2]]}
    texts = [part.text for part in deltas(llm, prompt)]
    assert "".join(texts) == one(llm, prompt).text == "\ufffdab"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"\xe6\xbc o", "\ufffd o"),
        (b"ab\xe6", "ab\ufffd"),
        (b"\xf0\x9f\x98 \xe6\xbc\xa2", "\ufffd \u6f22"),
        (b"a\xf0\x9f", "a\ufffd"),
    ],
)
def test_d51_broken_characters_neither_raise_nor_take_others_along(say: Any, said: bytes, text: str) -> None:
    """Blaizzy/mlx-vlm#1778: a token with a space replaced the bytes that waited."""
    llm = say(said)
    parts = deltas(llm)
    assert "".join(part.text for part in parts) == one(llm).text == said.decode("utf-8", "replace") == text
    assert all("\ufffd" not in part.text for part in parts[: -2 if text.endswith("\ufffd") else 0])


def test_d53_sentencepiece_keeps_spaces_whatever_the_steps(tmp_path: Path) -> None:
    """vllm-project/vllm#984: token by token the space behind a full stop was lost."""
    tokenizer = sentencepiece_like(tmp_path)
    ids = tokenizer.encode("One. Two.", add_special_tokens=False)
    assert len(ids) > 4
    for size in range(1, len(ids) + 1):
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids) == "One. Two."


def sentencepiece_like(folder: Path) -> Any:
    """Return a Llama-type tokenizer: spaces as U+2581, byte fallback, one space stripped in front."""
    from transformers import PreTrainedTokenizerFast

    from jackfield.interfaces import ModelFacts

    words = ["<unk>", "▁One", ".", "▁", "T", "w", "o", "▁T"]
    vocab = {word: number for number, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    letters = {char: len(vocab) + number for number, char in enumerate("One")}
    merges = [("▁", "T")]
    raw = RawTokenizer(
        models.BPE(vocab=vocab | letters, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)
    return load_tokenizer(folder, ModelFacts(str(folder), "safetensors", "LlamaForCausalLM"))
