// Tokens of an answer: each a piece of the text with its probability, told by a tint and by a tooltip.

const LEVELS = [0.9, 0.7, 0.4, 0.15];
const groups = new WeakMap();

/** Return the tokens of a chunk: `text` or `bytes` of each, its log probability, and the likeliest in its place. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((entry) => ({ ...plain(entry), top: entry.top_logprobs.map(plain) }));
  return logprobs.tokens.map((text, place) => ({
    text,
    logprob: logprobs.token_logprobs[place],
    top: Object.entries(logprobs.top_logprobs[place] ?? {})
      .map(([other, logprob]) => ({ text: other, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

const plain = ({ token, bytes, logprob }) => ({ text: token, bytes, logprob });

/** Brings tokens and text together. The text is what the server sent; tokens that are no part of it (a stop string, a
 *  token that only controls) get no piece, and a character made of several tokens is one piece. */
class Aligner {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #group = [];
  #queue = [];
  #text = "";

  /** Take a chunk and return the pieces that are complete: `text`, and `tokens` (none where they are not known). */
  push(text, tokens) {
    this.#text += text;
    for (const token of tokens) {
      this.#group.push(token);
      const shown = this.#textOf(token);
      if (shown) this.#queue.push({ text: shown, tokens: this.#group.splice(0) });
    }
    return this.#take();
  }

  /** Return the rest. */
  finish() {
    const text = this.#text;
    this.#text = "";
    return text ? [{ text, tokens: this.#queue[0]?.tokens ?? [] }] : [];
  }

  #textOf(token) {
    if (token.bytes === undefined) return token.text;
    return this.#decoder.decode(new Uint8Array(token.bytes ?? []), { stream: true });
  }

  #take() {
    const pieces = [];
    while (this.#queue.length && this.#text) {
      const next = this.#queue[0];
      const text = [next.text, next.text.trimStart()].find((one) => one && this.#text.startsWith(one));
      // The server holds text back that may become a stop string.
      if (text === undefined && next.text.startsWith(this.#text)) return pieces;
      this.#queue.shift();
      if (text === undefined) continue;
      pieces.push({ text, tokens: next.tokens });
      this.#text = this.#text.slice(text.length);
    }
    if (!this.#queue.length && !this.#group.length) pieces.push(...this.finish());
    return pieces;
  }
}

/** Return the node of a piece. */
function pieceNode({ text, tokens }) {
  if (!tokens.length) return document.createTextNode(text);
  const probability = Math.exp(Math.min(...tokens.map((token) => token.logprob)));
  const found = LEVELS.findIndex((least) => probability >= least);
  const level = found < 0 ? LEVELS.length : found;
  const node = make("span", { class: "token", "data-level": level, tabindex: -1, "aria-describedby": "tooltip" }, text);
  groups.set(node, tokens);
  return node;
}

/** Show the tooltip of a token. */
function showTooltip(node) {
  const tooltip = byId("tooltip");
  tooltip.replaceChildren(...groups.get(node).flatMap(describeToken));
  tooltip.hidden = false;
  const at = [...node.getClientRects()].at(-1);
  const { offsetWidth, offsetHeight } = tooltip;
  const below = at.bottom + offsetHeight + 8 < innerHeight;
  tooltip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - offsetWidth - 8))}px`;
  tooltip.style.top = `${Math.max(8, below ? at.bottom + 6 : at.top - offsetHeight - 6)}px`;
}

function hideTooltip() {
  byId("tooltip").hidden = true;
}

function describeToken(token) {
  const chosen = token.top.find((other) => other.text === token.text && other.logprob === token.logprob);
  const rows = chosen ? token.top : [...token.top, { ...token, chosen: true }];
  const title = make("div", {}, `${visible(token.text)} \u00b7 ${percent(token.logprob)}`);
  const table = make("table", {}, make("tbody", {}, ...rows.map((row) => alternative(row, row === chosen || row.chosen))));
  return [title, table];
}

function alternative({ text, logprob }, chosen) {
  const cells = [visible(text), percent(logprob), logprob.toFixed(2)].map((cell) => make("td", {}, cell));
  return make("tr", { class: chosen ? "chosen" : null }, ...cells);
}

const percent = (logprob) => {
  const part = Math.exp(logprob) * 100;
  return part > 0 && part < 0.1 ? "< 0.1 %" : `${part.toFixed(1)} %`;
};

/** Return a token's text with its white space made visible. */
const visible = (text) => text.replaceAll(" ", "\u2423").replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5") || "(nothing)";

/** Let hovering and the arrow keys show tooltips of the tokens below an element. */
function explainTokens(root) {
  const token = (event) => event.target.closest?.(".tokens .token");
  root.addEventListener("mouseover", (event) => (token(event) ? showTooltip(token(event)) : hideTooltip()));
  root.addEventListener("mouseleave", hideTooltip);
  root.addEventListener("focusin", (event) => token(event) && showTooltip(token(event)));
  root.addEventListener("focusout", hideTooltip);
  root.addEventListener("keydown", moveAmongTokens);
}

function moveAmongTokens(event) {
  const box = event.target.closest(".tokens");
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!box || !step) return;
  const all = [...box.querySelectorAll(".token")];
  const place = Math.max(0, Math.min(all.length - 1, all.indexOf(event.target) + step));
  if (!all.length) return;
  event.preventDefault();
  all[place].focus();
}
