"""People talk with a real model through the page."""

from __future__ import annotations

import math
import re

from page_steps import (
    ANSWER,
    Opened,
    ask,
    eventually,
    figures,
    greedy,
    idle,
    metric,
    post,
    refuse,
    say,
    sent_json,
    user,
    wait_for_end,
)
from playwright.sync_api import Page, expect
from served import Served

QUESTION = "Write one sentence about the sea."
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_a_question_is_asked_and_answered_by_keyboard_alone(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page)
    page.reload()
    expect(page.locator("#question")).to_be_focused()
    page.evaluate("""() => {
      window.lengths = [];
      const look = () => lengths.push(document.querySelector('.running .text')?.textContent.length ?? 0);
      new MutationObserver(look).observe(document.getElementById('log'), { subtree: true, childList: true });
    }""")
    page.keyboard.type("Say something")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("about the sea.")
    page.keyboard.press("Enter")
    text = wait_for_end(page)
    lengths = page.evaluate("[...new Set(lengths)].filter(Boolean)")
    # How many steps one sees depends on how busy the machine is.
    assert len(lengths) > 1 and lengths == sorted(lengths), "the text grew while it came"
    assert lengths[0] < max(lengths) <= len(text) and text.strip()
    expect(page.locator(".turn.asked .text")).to_have_text("Say something\nabout the sea.", use_inner_text=True)
    assert re.fullmatch(
        r"\d+ in( \(\d+ cached\))? · \d+ out · first after [\d.]+ m?s · [\d.]+ tokens/s( · .+)?", figures(page)
    )
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#status")).to_have_text("Done.")


def test_the_conversation_and_the_parameters_reach_the_server(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page)
    page.fill("#system", "You are a sailor.")
    page.fill("#stop", "zebra\\n\nquagga")
    ask(page, QUESTION)
    first = wait_for_end(page)
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "And of the sky?")
    second = wait_for_end(page)
    sent = sent_json(caught.value)
    assert sent["stop"] == ["zebra\n", "quagga"] and sent["logprobs"] is True and sent["top_logprobs"] == 5
    assert "top_p" not in sent and "seed" not in sent
    messages = [{"role": "system", "content": "You are a sailor."}, user(QUESTION)]
    answer = post(server, CHAT, messages=messages, temperature=0, max_tokens=24)["choices"][0]["message"]
    assert first == answer["content"]
    messages += [answer, user("And of the sky?")]
    assert sent["messages"] == [{k: m[k] for k in ("role", "content")} for m in messages]
    assert (
        second
        == post(server, CHAT, messages=messages, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
    )
    assert "24 out" in figures(page) and figures(page).endswith("cut at max tokens")


def test_escape_stops_the_answer_and_frees_the_engine(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page, 3000)
    ask(page, "Write a long story about a sailor.")
    page.wait_for_selector(".running .token")
    expect(page.locator("#send")).to_have_text("Stop")
    assert metric(server, "num_requests_running") == 1
    page.keyboard.press("Escape")
    idle(page)
    eventually(lambda: metric(server, "num_requests_running") == 0, "the engine goes on")
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert figures(page).endswith("stopped") and "out" in figures(page)
    length = len(page.locator(f"{ANSWER} .text").text_content() or "")
    ask(page, "Thank you.")
    page.wait_for_selector(f"{ANSWER}:nth-of-type(4) .token")
    page.locator("#send").click()
    idle(page)
    eventually(lambda: metric(server, "num_requests_running") == 0, "the button does not stop")
    assert len(page.locator(f"{ANSWER} .text").first.text_content() or "") == length


def rows(page: Page) -> list[tuple[str, float, float]]:
    """Return the rows of the tooltip: text, percent, log probability."""
    found = []
    for row in page.locator("#tooltip tr").all():
        text, percent, logprob = row.locator("td").all_inner_texts()
        found.append((text, float(percent.strip("< %")), float(logprob)))
    return found


def test_hovering_and_arrow_keys_tell_probabilities(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page)
    ask(page, QUESTION)
    text = wait_for_end(page)
    options = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    tokens = post(server, CHAT, messages=[user(QUESTION)], **options)["choices"][0]["logprobs"]["content"]
    spans = page.locator(f"{ANSWER} .token")
    assert "".join(spans.all_text_contents()) == text == "".join(token["token"] for token in tokens)
    spans.nth(0).hover()
    expect(page.locator("#tooltip")).to_be_visible()
    shown = [(other["token"].replace(" ", "␣"), other["logprob"]) for other in tokens[0]["top_logprobs"]]
    assert [(name, logprob) for name, _, logprob in rows(page)] == [(n, round(v, 2)) for n, v in shown]
    assert all(abs(percent - 100 * math.exp(logprob)) < 0.6 for _, percent, logprob in rows(page))
    page.mouse.move(5, 5)
    expect(page.locator("#tooltip")).to_be_hidden()
    page.locator(f"{ANSWER} .text").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(spans.nth(1)).to_be_focused()
    expect(page.locator("#tooltip")).to_contain_text(tokens[1]["token"].replace(" ", "␣"))
    page.keyboard.press("Escape")
    expect(page.locator("#tooltip")).to_be_hidden()
    levels = [int(span.get_attribute("data-level") or -1) for span in spans.all()]
    bounds = (0.9, 0.7, 0.4, 0.15, 0)
    assert levels == [next(i for i, b in enumerate(bounds) if math.exp(token["logprob"]) >= b) for token in tokens]


def test_without_probabilities_the_text_is_plain(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page)
    page.uncheck("#probabilities")
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, QUESTION)
    assert wait_for_end(page).strip()
    assert page.locator(f"{ANSWER} .token").count() == 0
    assert "logprobs" not in sent_json(caught.value)


def test_the_last_turn_can_be_tried_again_edited_copied_and_cleared(server: Served, visit: Opened) -> None:
    page = visit(server.url, permissions=["clipboard-read", "clipboard-write"])
    greedy(page, 12)
    ask(page, "Name a colour.")
    first = wait_for_end(page)
    page.locator("#retry").click()
    page.wait_for_selector(".running")
    assert wait_for_end(page) == first and page.locator(ANSWER).count() == 1
    page.locator("[data-copy]").click()
    expect(page.locator("#status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == first
    page.locator("#edit").click()
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#question")).to_have_value("Name a colour.")
    assert page.locator(".turn").count() == 0
    page.keyboard.press("Enter")
    wait_for_end(page)
    page.locator("#clear").click()
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]


def test_the_servers_errors_are_shown_and_are_no_part_of_the_conversation(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page, 999999)
    ask(page, "Hello")
    fault = page.locator(f"{ANSWER} [role=alert]")
    expect(fault).to_contain_text("HTTP 400, max_tokens: ")
    with server.client() as http:
        error = http.post(CHAT, json={"messages": [user("Hello")], "max_tokens": 999999}).json()["error"]
    assert (fault.text_content() or "").endswith(error["message"])
    expect(page.locator("#max_tokens")).to_have_attribute("aria-invalid", "true")
    page.fill("#max_tokens", "8")
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, "Hi")
    assert sent_json(caught.value)["messages"] == [user("Hi")]
    wait_for_end(page)
    expect(page.locator("#max_tokens")).not_to_have_attribute("aria-invalid", "true")


def test_a_parameter_that_is_no_number_of_its_kind_is_not_sent(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    page.fill("#top_k", "1.5")
    ask(page, "Hello")
    expect(page.locator("#top_k")).to_be_focused()
    assert page.evaluate("document.getElementById('top_k').validationMessage") == "This must be a whole number."
    expect(page.locator("#question")).to_have_value("Hello")
    assert "POST" not in sent


def test_what_a_model_writes_is_never_read_as_html(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    say(page, "Look: ", evil, " <b>bold</b>")
    ask(page, f"{evil} & <i>me</i>")
    assert wait_for_end(page) == f"Look: {evil} <b>bold</b>"
    page.locator(f"{ANSWER} .token").nth(1).hover()
    expect(page.locator("#tooltip")).to_contain_text("<img")
    assert page.locator(".turn.asked .text").text_content() == f"{evil} & <i>me</i>"
    assert page.locator("#log img, #log script, #log b, #log i, #tooltip img").count() == 0
    assert "owned" not in page.title()


def test_raw_text_goes_on_from_a_text(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page, 8)
    page.check("input[value=text]")
    assert page.locator("#system").is_hidden()
    ask(page, "The sea is")
    text = wait_for_end(page)
    answer = post(server, TEXT, prompt="The sea is", temperature=0, max_tokens=8)["choices"][0]["text"]
    assert text == answer == "".join(page.locator(f"{ANSWER} .token").all_text_contents())
    page.locator("#continue").click()
    expect(page.locator("#question")).to_have_value("The sea is" + text)


def test_a_model_without_a_chat_template_is_used_with_raw_text(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    greedy(page, 8)
    page.route("**/v1/chat/completions", lambda route: refuse(route, 400, "the model has no chat template", "messages"))
    ask(page, "The sea is")
    expect(page.locator("input[value=text]")).to_be_checked()
    expect(page.locator("#question")).to_have_value("The sea is")
    expect(page.locator("#status")).to_contain_text("no chat template")
    page.keyboard.press("Enter")
    assert wait_for_end(page).strip()


def test_an_answer_that_breaks_off_says_so(server: Served, visit: Opened) -> None:
    page = visit(server.url)
    cut = 'data: {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": null}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=cut, content_type="text/event-stream"))
    ask(page, "Hello")
    expect(page.locator(f"{ANSWER} [role=alert]")).to_have_text("the connection ended before the answer did")
    assert wait_for_end(page) == "Half"
