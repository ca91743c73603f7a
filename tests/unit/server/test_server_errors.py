"""What is wrong with a request is said in the API's own form, with the field at fault; nothing is dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, get, make_app, post, say
from fastapi import FastAPI

from jackfield.errors import ConfigError, EngineDeadError, JackfieldError, PluginError, RequestError
from jackfield.server.errors import answer, fault_of
from jackfield.server.openai.unknown import REFUSED

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(path: str, body: Any, **settings: Any) -> tuple[int, str | None, str]:
    """Return status, param and message of an error in OpenAI's form."""
    response = post(FakeEngine(), path, body, **settings)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["message"]


BIAS = "must be a map from token ids, written as texts, to numbers from -100 to 100"
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "temperature: input should be a valid number"),
    ({"temperature": -1}, "temperature", "temperature must be a finite number >= 0"),
    ({"top_p": 2}, "top_p", "top_p must be in (0, 1]"),
    ({"top_k": -2}, "top_k", "top_k must be 0 or -1 (off) or a positive whole number"),
    ({"min_p": 1.5}, "min_p", "min_p must be in [0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be in [-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty must be in [-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be a finite number > 0"),
    ({"seed": 2**64}, "seed", "seed must be a 64-bit whole number"),
    ({"seed": True}, "seed", "seed: input should be a valid integer"),
    ({"n": 0}, "n", "n: input should be greater than or equal to 1"),
    ({"n": 99999, "temperature": 1}, "n", "n must be a whole number from 1 to 16384"),
    ({"stop": ["a", 1]}, "stop", "stop: must be a text or a list of texts"),
    ({"stop": [""]}, "stop", "stop must be a list of non-empty strings"),
    ({"stop": ["x"] * 500_000}, "stop", "stop must be at most 1024 strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids: must be a list of token ids"),
    ({"stop_token_ids": [999]}, "stop_token_ids", "stop_token_ids has token ids outside the vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids must be a non-empty list of token ids"),
    ({"bad_words": "no"}, "bad_words", "bad_words: must be a list of at most 1024 texts"),
    ({"bad_words": ["no"] * 1025}, "bad_words", "bad_words: must be a list of at most 1024 texts"),
    ({"logit_bias": {"AI": -100}}, "logit_bias", "keys of logit_bias are token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "a bias must be from -100 to 100"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "logit_bias has token ids outside the vocabulary"),
    ({"logit_bias": [1]}, "logit_bias", f"logit_bias: {BIAS}"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "min_tokens must be at most max_tokens = 10"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens: input should be greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, which only scores a prompt, and no score is asked for"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs must be a whole number from 0 to 20"),
    ({"repetition_detection": {"max": 1}}, "repetition_detection", "repetition_detection is malformed"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "a prompt cannot be cut to nothing"),
    ({"priority": 3}, "priority", "the server's scheduling policy 'fcfs' does not read priorities"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt: string should have at least 1 character"),
    ({"request_id": "a b"}, "request_id", "request_id: string should match pattern"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options needs a stream"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "stream_options"),
]
CHAT_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages: list should have at least 1 item"),
    ({"messages": ["x"]}, "messages.0", "messages.0: input should be a valid dictionary"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "a message needs a role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "the content of a message is a text or a list of parts"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be a whole number from 0 to 20"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "max_tokens and max_completion_tokens are two names"),
    ({"response_format": {"type": "json_object"}}, "response_format", "structured output is not available yet"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "structured output is not available yet"),
    ({"response_format": {}}, "response_format.type", "the type of response_format is 'text'"),
    ({"tools": [{"type": "x"}]}, "tools.0", "a tool is a function with a name"),
    ({"tool_choice": "required"}, "tool_choice", "calls of tools cannot be forced yet"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "calls of tools cannot be forced yet"),
    ({"service_tier": "flex"}, "service_tier", "service_tier: input should be 'auto' or 'default'"),
]
TEXT_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "prompt", "prompt: must be a text, a list of token ids, or a list of 1 to 2048 texts"),
    ({"prompt": ["x"] * 2049}, "prompt", "prompt: must be a text, a list of token ids, or a list of 1 to 2048 texts"),
    ({"prompt": [1, "a"]}, "prompt", "prompt: must be a text, a list of token ids"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": [999]}, "prompt", "the prompt has token ids outside the vocabulary"),
    ({"prompt": ["a", ""]}, "prompt", "the prompt is empty"),
    ({"suffix": "x"}, "suffix", "completions with a suffix are not supported"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of must be at least n = 2"),
    ({"best_of": 3, "stream": True}, "best_of", "the best of several completions are known at the end only"),
    ({"prompt": ["x"] * 2048, "n": 9}, "n", "2048 prompts with 9 completions each are more than 16384"),
    ({"logprobs": 21}, "logprobs", "logprobs must be a whole number from 0 to 20"),
]


@pytest.mark.parametrize(("fields", "param", "message"), CASES + CHAT_CASES)
def test_wrong_fields_of_chat(fields: dict[str, Any], param: str, message: str) -> None:
    status, where, text = refused(CHAT, {**say(), **fields})
    assert (status, where) == (400, param)
    assert text.startswith(message)


@pytest.mark.parametrize(("fields", "param", "message"), CASES + TEXT_CASES)
def test_wrong_fields_of_completions(fields: dict[str, Any], param: str, message: str) -> None:
    status, where, text = refused(TEXT, {"prompt": "x", **fields})
    assert (status, where) == (400, param)
    assert text.startswith(message)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    status, param, text = refused(CHAT, {**say(), name: {"type": "x"}})
    assert (status, param) == (400, name) and text.startswith(f"{name}: {REFUSED[name][0]}")
    for neutral in (None, *REFUSED[name][1]):
        response = post(FakeEngine(), CHAT, say(**{name: neutral}))
        assert response.status_code == 200 and "x-jackfield-ignored" not in response.headers


def test_all_refused_fields_are_told_at_once() -> None:
    _, _, text = refused(CHAT, say(guided_json={}, use_beam_search=True))
    assert text == (
        "guided_json: structured output is not available yet; use_beam_search: beam search is not served over HTTP; "
        "leave it out"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(stream: bool) -> None:
    fields: dict[str, Any] = {"temprature": 1, "bad\r\nname": 2, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usge": True}
    response = post(FakeEngine(), CHAT, say(**fields))
    assert response.status_code == 200
    expected = "temprature, bad%0D%0Aname" + (", stream_options.include_usge" if stream else "")
    assert response.headers["x-jackfield-ignored"] == expected


def test_c35_the_two_ways_to_be_too_long_are_told_apart() -> None:
    prompt = "x" * 250
    assert refused(TEXT, {"prompt": prompt, "max_tokens": 10}) == (
        400,
        "max_tokens",
        "the prompt has 250 tokens and max_tokens is 10, together 260, but the context holds 256; "
        "ask for at most 6 tokens, or shorten the prompt",
    )
    assert refused(TEXT, {"prompt": prompt * 2, "max_tokens": 10}) == (
        400,
        "prompt",
        "the prompt has 500 tokens, but the context holds 256 with at least one of output; "
        "shorten the prompt to 255 tokens or less",
    )
    status, param, _ = refused(CHAT, say("x", max_completion_tokens=1000))
    assert (status, param) == (400, "max_completion_tokens")


def test_c37_without_a_limit_the_answer_may_fill_the_context() -> None:
    engine = FakeEngine([97] * 500)
    usage = post(engine, CHAT, say()).json()["usage"]
    assert usage["total_tokens"] == 256
    assert post(engine, TEXT, {"prompt": "x"}).json()["usage"]["completion_tokens"] == 16


def test_c41_five_megabytes_of_one_character_are_refused_at_once() -> None:
    status, param, text = refused(TEXT, {"prompt": "a" * 5_000_000})
    assert (status, param) == (400, "prompt")
    assert text.startswith("the prompt has 5000000 characters, but the context holds 256 tokens")
    assert refused(CHAT, say("a" * 5_000_000))[:2] == (400, "messages.0.content")


@pytest.mark.parametrize("top_k", [9_999_999, -1, 0])
def test_c45_top_k_beyond_the_vocabulary_and_off(top_k: int) -> None:
    assert post(FakeEngine(), CHAT, say(top_k=top_k)).status_code == 200


def test_bodies_that_are_no_requests() -> None:
    def message(body: bytes) -> tuple[int, str, str | None]:
        response = post(FakeEngine(), CHAT, body)
        error = response.json()["error"]
        return response.status_code, error["message"], error["code"]

    assert message(b'{"a": }') == (400, "the body is no JSON: Expecting value at character 6", "invalid_json")
    assert message(b"") == (400, "the request has no body; send a JSON object", None)
    assert message(b"[1]")[0] == 400
    assert message(b"\xff\xfe")[0] == 400
    assert message(b"[" * 100_000)[0] == 400
    assert message(b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}')[0] == 400
    assert message(b'{"messages":[{"role":"user","content":"\\ud800"}]}')[:2] == (
        400,
        "the text has half of a surrogate pair, which is no character; send valid Unicode",
    )


def test_half_a_character_anywhere_does_no_harm() -> None:
    for field in ("model", "user", "stop", "chat_template", "request_id", "cache_salt", "\\ud800"):
        body = f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":"\\ud800"}}'.encode()
        assert post(FakeEngine(), CHAT, body).status_code in (200, 400, 404), field
    for message in ('{"role":"\\ud800","content":"x"}', '{"role":"user","content":"x","name":"\\ud800"}'):
        assert post(FakeEngine(), CHAT, f'{{"messages":[{message}]}}'.encode()).status_code in (200, 400)


def test_unknown_models_and_pages() -> None:
    response = post(FakeEngine(), CHAT, say(model="fake/modle"))
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "the model 'fake/modle' is not served here; did you mean 'fake/model'?",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert get(FakeEngine(), "/v1/models/nope").json()["error"]["code"] == "model_not_found"
    assert get(FakeEngine(), "/nope").json()["error"]["type"] == "not_found_error"
    assert get(FakeEngine(), CHAT).status_code == 405


def test_errors_of_the_engine() -> None:
    full = RequestError("too many requests are waiting", field="scheduler.max_waiting", value=1, remedy="later")
    response = post(FakeEngine(fail_after=0, error=full), CHAT, say())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "queue_full"
    dead = post(FakeEngine(fail_after=0, error=EngineDeadError("the engine process ended")), CHAT, say())
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
    broken = post(FakeEngine(fail_after=1, error=ZeroDivisionError("secret")), CHAT, say())
    assert broken.status_code == 500 and "secret" not in broken.text
    for path, body in ((CHAT, say(stream=True)), (TEXT, {"prompt": ["a", "b"], "stream": True})):
        early = post(FakeEngine(fail_after=0, error=full), path, body)
        assert early.status_code == 503, "what is known before the stream begins has a status of its own"


def test_an_error_in_mid_stream_is_the_last_event() -> None:
    engine = FakeEngine("Hello", fail_after=2, error=EngineDeadError("the engine process ended"))
    for path, body in ((CHAT, say(stream=True)), (TEXT, {"prompt": "a", "stream": True})):
        blocks = post(engine, path, body).text.split("\n\n")
        assert json.loads(blocks[-2].removeprefix("data: ")) == {
            "error": {
                "message": "the engine process ended",
                "type": "service_unavailable",
                "param": None,
                "code": "engine_dead",
            }
        }
        assert "DONE" not in "".join(blocks) and not engine.living


def test_the_shape_depends_on_the_path() -> None:
    fault = fault_of(RequestError("top_p must be smaller", field="sampling_params.top_p", value=2))
    response = answer(fault, "/v1/messages/count_tokens")
    assert json.loads(bytes(response.body)) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "top_p: top_p must be smaller"},
    }
    assert json.loads(bytes(answer(fault, "/v1/other").body))["error"]["param"] == "top_p"
    assert fault_of(JackfieldError("odd")).status == 500


def test_fields_reach_the_engine() -> None:
    engine = FakeEngine(policy="priority")
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "stop": ["zz"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "bad_words": ["no"],
        "allowed_token_ids": [72, 101],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "extra_args": {"a": 1},
    }
    others: dict[str, Any] = {
        "logit_bias": {"72": -5},
        "repetition_detection": {"max_pattern_size": 3},
        "max_tokens": 9,
    }
    more: dict[str, Any] = {"priority": -4, "cache_salt": "tenant", "user": "u", "metadata": {}, "store": True}
    assert post(engine, CHAT, say(**fields, **others, **more)).status_code == 200
    params = engine.params[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {72: -5.0} and params.max_tokens == 9
    assert params.repetition_detection is not None and params.repetition_detection.max_pattern_size == 3
    assert (engine.priorities, engine.salts) == ([-4], ["tenant"])


def test_the_models_own_defaults_hold_until_a_request_says_otherwise() -> None:
    engine = FakeEngine("Hello")
    engine.defaults = {"temperature": 0.25, "top_k": 9, "max_tokens": 3}
    post(engine, CHAT, say(top_k=4))
    post(engine, TEXT, {"prompt": "x", "max_tokens": 2})
    assert [(p.temperature, p.top_k, p.max_tokens) for p in engine.params] == [(0.25, 4, 3), (0.25, 9, 2)]


def test_prompts_are_cut_on_the_left() -> None:
    engine = FakeEngine()
    post(engine, TEXT, {"prompt": "abcdef", "truncate_prompt_tokens": 2})
    post(engine, TEXT, {"prompt": "x" * 300, "truncate_prompt_tokens": -1, "max_tokens": 6})
    assert engine.prompts == [[101, 102], [120] * 250]


def test_a_request_id_is_part_of_the_answers_id() -> None:
    assert post(FakeEngine(), CHAT, say(request_id="abc-1")).json()["id"] == "chatcmpl-abc-1"


def test_the_fingerprint_follows_the_configuration() -> None:
    def fingerprint(**settings: Any) -> str:
        found: str = post(FakeEngine(**settings), CHAT, say()).json()["system_fingerprint"]
        return found

    assert fingerprint() == fingerprint() != fingerprint(seed=4)


def with_routes(register: Callable[[FastAPI], None]) -> FakeEngine:
    engine = FakeEngine()
    engine.routes = register
    return engine


def test_route_plugins_that_were_named_add_routes() -> None:
    def register(app: FastAPI) -> None:
        app.add_api_route("/extra", lambda: "here")

    assert get(with_routes(register), "/extra", allow_routes=("acme",)).json() == "here"
    assert get(with_routes(register), "/extra").status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/{anything}", "/{all:path}", "/v1/models/{x}"])
def test_route_plugins_never_take_the_cores_place(path: str) -> None:
    def register(app: FastAPI) -> None:
        app.add_api_route(path, lambda: "mine")

    with pytest.raises(PluginError, match=r"hook plugin 'acme' adds a route for GET /\S*, which the core answers"):
        make_app(with_routes(register), allow_routes=("acme",))


def test_route_plugins_remove_nothing() -> None:
    with pytest.raises(PluginError, match="hook plugin 'acme' removes routes of the server"):
        make_app(with_routes(lambda app: app.router.routes.clear()), allow_routes=("acme",))


def test_a_route_plugin_that_adds_nothing_is_an_error() -> None:
    with pytest.raises(PluginError, match="hook plugin 'acme' adds no routes; if it failed, the log says how"):
        make_app(FakeEngine(), allow_routes=("acme",))


def test_a_template_file_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        make_app(FakeEngine(), chat_template="/nowhere.jinja")
