// The view Errors: the catalogue, searched as one types.

import { byId, call, element, Problem, prose } from "./api.js";

let entries = null;

function words(entry) {
  return [entry.code, entry.status, entry.message, entry.meaning, entry.when, ...entry.todo].join(" ").toLowerCase();
}

function shownEntry(entry) {
  return element(
    "details",
    {},
    element("summary", {}, element("code", {}, entry.code), ` ${entry.status} · `, ...prose(entry.meaning)),
    element("p", { className: "message" }, entry.message),
    element("ol", {}, ...entry.todo.map((step) => element("li", {}, ...prose(step)))),
    element("p", {}, ...prose(entry.when)),
    element("p", { className: "soft" }, entry.retryable ? "A retry makes sense. " : "A retry will not help. ",
      element("a", { href: `/errors/${entry.code}` }, "Full page")),
  );
}

function render() {
  if (!entries) return;
  const wanted = byId("error-search").value.toLowerCase().split(/[^a-z0-9]+/).filter(Boolean);
  const found = entries.filter((entry) => wanted.every((word) => words(entry).includes(word)));
  byId("error-list").replaceChildren(...found.map(shownEntry));
  byId("error-count").textContent = `${found.length} of ${entries.length} errors`;
}

export async function shown() {
  if (entries) return;
  try {
    entries = await (await call("/dashboard/errors")).json();
    render();
  } catch (error) {
    byId("error-count").textContent = error instanceof Problem ? error.message : "not connected";
  }
}

export const begin = () => byId("error-search").addEventListener("input", render);
