// One answer on the page while it streams in, and its figures.

class AnswerView {
  text = "";
  reason = null;
  #aligner = new Aligner();
  #started = performance.now();
  #first = null;
  #last = null;
  #usage = null;
  #chunks = 0;

  /** Args: who: heading. follow: called after each change, to keep the end in view. */
  constructor(who, follow) {
    this.follow = follow;
    this.box = make("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": "Answer; arrow keys go from token to token" });
    this.figures = make("p", { class: "figures" });
    this.copy = make("button", { type: "button", class: "quiet", "data-copy": true }, "Copy");
    this.below = make("div", { class: "below" }, this.copy, this.figures);
    this.node = make("article", { class: "turn answered running", "aria-label": who }, make("p", { class: "who" }, who), this.box, this.below);
    this.copy.addEventListener("click", () => this.#copyText());
  }

  /** Take a chunk of the stream. */
  take(chunk) {
    this.#usage = chunk.usage ?? this.#usage;
    for (const choice of chunk.choices) {
      const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
      const tokens = tokensOf(choice.logprobs);
      if (text || tokens.length) this.#clock();
      this.text += text;
      this.#append(this.#aligner.push(text, tokens));
      this.reason = choice.finish_reason ?? this.reason;
    }
    this.figures.textContent = this.#told("");
  }

  /** Say how it ended. */
  end(how) {
    this.#append(this.#aligner.finish());
    this.node.classList.remove("running");
    this.figures.textContent = this.#told(how ?? { stop: "", length: "cut at max tokens" }[this.reason] ?? this.reason);
  }

  /** Show an error below what came of the answer. */
  fail(error) {
    this.node.classList.add("failed");
    const where = [error.status && `HTTP ${error.status}`, error.code, error.param].filter(Boolean).join(", ");
    const code = where ? [make("code", {}, `${where}: `)] : [];
    const text = error instanceof TypeError ? `the server cannot be reached: ${error.message}` : error.message;
    this.below.before(make("p", { class: "fault", role: "alert" }, ...code, text));
    this.end("failed");
  }

  #append(pieces) {
    this.box.append(...pieces.map(pieceNode));
    this.follow();
  }

  #clock() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#chunks += 1;
  }

  /** Return tokens, times and how it ended, as far as they are known. */
  #told(how) {
    const parts = [];
    if (this.#usage) {
      const cached = this.#usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${this.#usage.prompt_tokens} in${cached ? ` (${cached} cached)` : ""}`, `${this.#usage.completion_tokens} out`);
    }
    if (this.#first !== null) parts.push(`first after ${seconds(this.#first - this.#started)}`);
    const count = this.#usage?.completion_tokens ?? this.#chunks;
    if (this.#last > this.#first && count > 1) parts.push(`${(((count - 1) * 1000) / (this.#last - this.#first)).toFixed(1)} tokens/s`);
    return [...parts, how].filter(Boolean).join(" \u00b7 ");
  }

  async #copyText() {
    try {
      await navigator.clipboard.writeText(this.text);
      say("status", "Copied.");
    } catch {
      getSelection().selectAllChildren(this.box);
      say("status", "The browser does not allow copying here; the answer is selected instead.");
    }
  }
}

const seconds = (milliseconds) => (milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`);
