// The parameters of a request. An empty field is not sent: the server's default holds.

const NUMBERS = [
  { name: "temperature", label: "Temperature", step: 0.1 },
  { name: "max_tokens", label: "Max tokens", step: 1, whole: true },
  { name: "top_p", label: "Top p", step: 0.05 },
  { name: "top_k", label: "Top k", step: 1, whole: true },
  { name: "min_p", label: "Min p", step: 0.05 },
  { name: "seed", label: "Seed", step: 1, whole: true },
  { name: "presence_penalty", label: "Presence pen.", step: 0.1 },
  { name: "frequency_penalty", label: "Frequency pen.", step: 0.1 },
  { name: "repetition_penalty", label: "Repetition pen.", step: 0.1 },
];
const MAX_TOKENS = 512;
const ALTERNATIVES = 5;
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };

/** Make the number fields. What range they have is the server's business: it says what is wrong. */
function buildSettings() {
  for (const { name, label, step } of NUMBERS) {
    const attributes = { type: "number", id: name, step: "any", placeholder: "default", "data-step": step };
    const input = make("input", attributes);
    input.addEventListener("keydown", (event) => stepBy(input, event));
    byId("numbers").append(make("label", {}, label, input));
  }
  byId("max_tokens").value = MAX_TOKENS;
  byId("parameters").addEventListener("submit", (event) => event.preventDefault());
}

/** With a step of "any", so that every number is accepted, the arrow keys would step by 1. */
function stepBy(input, event) {
  const sign = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!sign) return;
  event.preventDefault();
  const step = Number(input.dataset.step);
  input.value = Number(((Number(input.value) || 0) + sign * step).toFixed(6));
}

const mode = () => document.querySelector("input[name=mode]:checked").value;

/** Return the fields of a request, or null when one of them is no number; it is shown then. */
function readSettings() {
  const fields = {};
  for (const { name, whole } of NUMBERS) {
    const input = byId(name);
    input.removeAttribute("aria-invalid");
    input.setCustomValidity(whole && input.value && !/^-?\d+$/.test(input.value) ? "This must be a whole number." : "");
    if (!input.checkValidity()) return showInvalid(input);
    if (input.value !== "") fields[name] = whole ? wholeNumber(input.value) : Number(input.value);
  }
  const stop = byId("stop").value.split("\n").filter(Boolean).map(unescape);
  if (stop.length) fields.stop = stop;
  return { ...fields, ...probabilityFields() };
}

/** Seeds may be larger than the numbers that JSON.stringify writes exactly; those are refused by the server as texts. */
const wholeNumber = (text) => (Number.isSafeInteger(Number(text)) ? Number(text) : text);

const unescape = (text) => text.replace(/\\[nt\\]/g, (found) => ESCAPES[found]);

function probabilityFields() {
  if (!byId("probabilities").checked) return {};
  return mode() === "chat" ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
}

function showInvalid(input) {
  byId("settings").open = true;
  input.reportValidity();
  return null;
}

/** Mark the field that the server refused. */
function markRefused(param) {
  if (NUMBERS.some(({ name }) => name === param)) byId(param).setAttribute("aria-invalid", "true");
}
