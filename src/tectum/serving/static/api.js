// Calls to the server, each with the token where there is one, and the stream of events. Owns the token.

const KEY = "tectum-token";

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || `The server answered with status ${status}`);
    this.status = status;
    this.body = body;
  }
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);
export const hasToken = () => sessionStorage.getItem(KEY) !== null;

export async function call(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { ...options.headers, authorization: `Bearer ${token}` } : options.headers;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    throw new Problem(response.status, await response.json().catch(() => ({})));
  }
  return response;
}

// Hands each event's data to `take` until the stream ends; throws a Problem when the server refuses it.
export async function listen(path, signal, take) {
  const response = await call(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data) take(JSON.parse(data.slice(6)));
    }
  }
}

// An element with properties, and children that are text unless they are elements: nothing is ever parsed as HTML.
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-")) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

// Prose with `code` set as such.
export const prose = (text) => text.split("`").map((piece, index) => (index % 2 ? element("code", {}, piece) : piece));

export const byId = (id) => document.getElementById(id);
export const milliseconds = (seconds) => (seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0);
export const count = (number) => Math.round(number).toLocaleString("en");

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(number, 1)) / 10));
  return `${(number / 2 ** (10 * unit)).toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

export const STAGES = ["fetch", "prepare", "queue", "forward", "send"];
