// The playground: a conversation, or texts that the model goes on from. All of it is in memory only.

const NO_TEMPLATE = "no chat template";
const WORDS = {
  chat: { label: "Your message", send: "Send" },
  text: { label: "Text to go on from", send: "Complete" },
};

class Playground {
  #turns = [];
  #running = null;

  constructor() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.stop();
      else this.send(byId("question").value);
    });
    byId("question").addEventListener("keydown", (event) => this.#onKey(event));
    addEventListener("keydown", (event) => event.key === "Escape" && this.#onEscape());
    byId("retry").addEventListener("click", () => this.retry());
    byId("edit").addEventListener("click", () => this.edit());
    byId("continue").addEventListener("click", () => this.goOn());
    byId("clear").addEventListener("click", () => this.clear());
    byId("parameters").addEventListener("change", (event) => event.target.name === "mode" && this.#changeMode());
    explainTokens(byId("log"));
    this.#changeMode();
  }

  /** Ask the model. Nothing is sent when a parameter is no number. */
  async send(question) {
    const fields = readSettings();
    if (this.#running || !fields || !question.trim()) return;
    byId("question").value = "";
    await this.#ask(question, fields);
  }

  stop() {
    this.#running?.abort();
  }

  /** Ask the last question again; its answer is thrown away. */
  async retry() {
    const fields = readSettings();
    if (this.#running || !fields || !this.#turns.length) return;
    await this.#ask(this.#drop().question, fields);
  }

  /** Take the last question back into the text field. */
  edit() {
    if (this.#running || !this.#turns.length) return;
    this.#write(this.#drop().question);
  }

  /** Put the last text and what the model added into the text field. */
  goOn() {
    const turn = this.#turns.at(-1);
    if (turn && !this.#running) this.#write(turn.question + turn.view.text);
  }

  clear() {
    if (this.#running) return;
    while (this.#turns.length) this.#drop();
    say("status", "Cleared.");
    byId("question").focus();
  }

  async #ask(question, fields) {
    const turn = this.#open(question);
    const controller = new AbortController();
    this.#running = controller;
    this.#changed("Waiting for the first token\u2026");
    try {
      for await (const chunk of stream(...this.#request(question, fields), controller.signal)) {
        turn.view.take(chunk);
        if (turn.view.text) say("status", "Answering\u2026");
        say("progress", turn.view.figures.textContent);
      }
      turn.view.end();
      this.#finish("Done.");
    } catch (error) {
      this.#failed(turn, error, controller.signal.aborted);
    }
  }

  #request(question, fields) {
    const options = { ...fields, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    if (mode() === "text") return ["v1/completions", { prompt: question, ...options }];
    return ["v1/chat/completions", { messages: this.#messages(), ...options }];
  }

  /** Return the conversation. Turns that failed before the model said anything are no part of it. */
  #messages() {
    const system = byId("system").value;
    const said = this.#turns.flatMap(({ question, view }, place) => {
      const user = { role: "user", content: question };
      if (place === this.#turns.length - 1) return [user];
      return view.text ? [user, { role: "assistant", content: view.text }] : [];
    });
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  #open(question) {
    const log = byId("log");
    const asked = make("article", { class: "turn asked", "aria-label": "You" }, make("p", { class: "who" }, "You"), make("div", { class: "text" }, question));
    const view = new AnswerView("Model", () => this.#follow());
    byId("empty").hidden = true;
    log.setAttribute("aria-busy", "true");
    log.append(asked, view.node);
    this.#turns.push({ question, asked, view });
    byId("scroller").scrollTop = byId("scroller").scrollHeight;
    return this.#turns.at(-1);
  }

  #drop() {
    const turn = this.#turns.pop();
    turn.asked.remove();
    turn.view.node.remove();
    byId("empty").hidden = this.#turns.length > 0;
    hideTooltip();
    this.#changed("");
    return turn;
  }

  #failed(turn, error, stopped) {
    if (stopped) {
      turn.view.end("stopped");
      this.#finish("Stopped.");
      return;
    }
    turn.view.fail(error);
    markRefused(error.param);
    this.#finish("The server could not answer.");
    if (mode() === "chat" && error.message.includes(NO_TEMPLATE)) this.#leaveChat();
  }

  /** The model has no chat template: go on with raw texts. */
  #leaveChat() {
    const { question } = this.#drop();
    document.querySelector("input[name=mode][value=text]").checked = true;
    this.#changeMode();
    this.#write(question);
    say("status", "The model has no chat template, so this is the mode for raw text now.");
  }

  #finish(text) {
    this.#running = null;
    byId("log").removeAttribute("aria-busy");
    this.#changed(text);
  }

  #changed(text) {
    const busy = this.#running !== null;
    say("status", text);
    say("progress", "");
    byId("send").textContent = busy ? "Stop" : WORDS[mode()].send;
    for (const id of ["retry", "edit", "clear", "continue"]) byId(id).disabled = busy || !this.#turns.length;
    for (const input of document.querySelectorAll("input[name=mode]")) input.disabled = busy;
  }

  /** A conversation and single texts are different things, so the log begins anew. */
  #changeMode() {
    const raw = mode() === "text";
    while (this.#turns.length) this.#drop();
    byId("composer").classList.toggle("raw", raw);
    byId("question-label").textContent = WORDS[mode()].label;
    byId("system-row").hidden = raw;
    byId("continue").hidden = !raw;
    this.#changed("");
  }

  #write(text) {
    byId("question").value = text;
    byId("question").focus();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.#running) this.send(event.target.value);
  }

  #onEscape() {
    hideTooltip();
    if (!byId("key-dialog").open) this.stop();
  }

  /** Keep the end in view, unless the reader has scrolled away from it. */
  #follow() {
    const box = byId("scroller");
    const away = box.scrollHeight - box.clientHeight - box.scrollTop;
    if (away < 80) box.scrollTop = box.scrollHeight;
  }
}
