// Requests to this server: the API key, errors, and streams of events.

// The page may lie behind a proxy that publishes it below a prefix.
const BASE = location.pathname.endsWith("/") ? location.pathname : `${location.pathname}/`;
const KEY = "jackfield.key";

/** What the server answered instead of what was asked for. */
class ServerError extends Error {
  constructor(status, error) {
    super(error.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error.code ?? null;
    this.param = error.param ?? null;
  }
}

/** Ask the server; a body makes it a POST. Asks the user for a key when the server wants one, unless `quiet`.
 *  Throws ServerError, TypeError (no connection), or AbortError. */
async function ask(path, { body = null, signal = null, quiet = false } = {}) {
  for (;;) {
    const response = await fetch(BASE + path, { ...method(body), headers: headers(body), signal, cache: "no-store" });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || quiet || !(await askForKey(error.message))) throw error;
  }
}

const method = (body) => (body === null ? {} : { method: "POST", body: JSON.stringify(body) });

function headers(body) {
  const key = sessionStorage.getItem(KEY);
  return { ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return new ServerError(response.status, JSON.parse(text).error ?? {});
  } catch {
    return new ServerError(response.status, { message: text.slice(0, 500) || undefined });
  }
}

/** Yield what the server-sent events of a request hold. */
async function* stream(path, body, signal) {
  const response = await ask(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for await (const data of blocks(reader)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(0, chunk.error);
      yield chunk;
    }
    throw new ServerError(0, { message: "the connection ended before the answer did" });
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function* blocks(reader) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    for (const block of found) yield block.replace(/^data: /, "");
  }
}

let keyAsked = null;

/** Open the dialog for the key; several requests share one. Resolves to whether there is a key to try. */
function askForKey(reason) {
  keyAsked ??= openKeyDialog(reason).finally(() => (keyAsked = null));
  return keyAsked;
}

function openKeyDialog(reason) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason;
  byId("key").value = sessionStorage.getItem(KEY) ?? "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  byId("key").select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(keepKey(dialog.returnValue)), { once: true });
  });
}

function keepKey(choice) {
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (choice === "forget") sessionStorage.removeItem(KEY);
  if (choice !== "use" || !key) return false;
  sessionStorage.setItem(KEY, key);
  return true;
}
