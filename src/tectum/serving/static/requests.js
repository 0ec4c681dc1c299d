// The view Requests: what lives and what ended last, a bar per stage on one axis, and the details of one.

import { byId, bytes, call, element, milliseconds, prose, STAGES } from "./api.js";

const KEPT = 300;
const outcomes = []; // newest first
let living = [];
let chosen = null; // key of the request whose details are shown
let opener = null; // where the focus goes when they close

const key = (request) => request.number ?? `live ${request.req_id}`;
const failed = (request) => request.error !== undefined && request.error !== null;

function matches(request) {
  const [state, modality, error, id] = ["state", "modality", "error", "id"].map((one) => byId(`filter-${one}`).value);
  const code = request.error?.code;
  return (
    (!state || request.state === state) &&
    (!modality || (request.modality ?? request.metadata?.modality) === modality) &&
    (!error || (error === "none" ? !code : code === error)) &&
    (!id || request.req_id.includes(id))
  );
}

function bar(request) {
  const made = element("span", { className: "bar" });
  const parts = request.number ? STAGES.filter((stage) => request.stages[stage]) : [];
  for (const stage of parts) {
    const part = element("i", { className: stage, title: `${stage} ${milliseconds(request.stages[stage])} ms` });
    part.style.setProperty("--ms", request.stages[stage] * 1e3);
    made.append(part);
  }
  return made;
}

function row(request) {
  const when = request.number ? new Date(request.ended * 1e3).toLocaleTimeString("en-GB") : "live";
  const items = request.items ?? request.metadata?.item_rows.length;
  const kind = request.modality ?? request.metadata?.modality ?? "";
  const button = element(
    "button",
    { type: "button", "aria-expanded": String(key(request) === chosen) },
    element("span", {}, when),
    element("span", { title: request.req_id }, request.req_id),
    element("span", {}, items ? `${items} × ${kind}` : kind),
    element("span", { className: failed(request) ? "failed" : "" }, request.error?.code ?? request.state),
    element("span", { className: "number" }, `${milliseconds(request.seconds)} ms`),
    bar(request),
  );
  button.dataset.key = key(request);
  return element("li", {}, button);
}

function render() {
  if (byId("requests").hidden) return;
  const focused = document.activeElement?.dataset?.key;
  const shown = [...living, ...outcomes].filter(matches);
  const longest = Math.max(1, ...shown.filter((one) => one.number).map((one) => one.seconds * 1e3));
  const list = byId("request-list");
  list.style.setProperty("--longest", longest);
  list.replaceChildren(...shown.map(row));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => element("span", {}, `${(share * longest).toFixed(longest < 20 ? 1 : 0)}${share === 1 ? " ms" : ""}`));
  byId("axis").replaceChildren(element("div", {}, ...ticks));
  byId("shown").textContent = `${shown.length} of ${living.length + outcomes.length} requests`;
  if (focused) list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return element("dl", { className: "facts" }, ...known.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]));
}

async function explain(error, place) {
  const found = await (await call(`/api/errors/${encodeURIComponent(error.code)}`)).json();
  place.replaceChildren(
    element("p", {}, ...prose(found.meaning)),
    element("ol", {}, ...found.todo.map((step) => element("li", {}, ...prose(step)))),
    element("p", {}, element("a", { href: found.page }, `All about ${error.code}`)),
  );
}

function open(request) {
  chosen = key(request);
  const { metadata, error } = request;
  byId("detail-title").textContent = request.req_id;
  const body = byId("detail-body");
  body.replaceChildren(
    facts([
      [request.number ? "released" : "state", request.state],
      ["ended", request.ended && new Date(request.ended * 1e3).toLocaleString("en-GB")],
      ["in all", `${milliseconds(request.seconds)} ms`],
      ...STAGES.filter((stage) => request.stages?.[stage] !== undefined).map((stage) => [stage, `${milliseconds(request.stages[stage])} ms`]),
      ["destinations", request.destinations?.join(", ")],
      ["part", metadata && `${metadata.part_idx + 1} of ${metadata.num_parts}`],
      ["rows", metadata && `${metadata.rows} of ${metadata.width} ${metadata.dtype}`],
      ["rows by item", metadata?.item_rows.join(", ")],
      ["grids (t, h, w)", metadata?.grid_thw.map((grid) => grid.join("×")).join(", ")],
      ["deepstack layers", metadata?.deepstack_layers || ""],
      ["size", metadata && bytes(metadata.bytes)],
    ]),
  );
  if (error) {
    const item = error.item === undefined ? "" : ` (item ${error.item})`;
    const entry = element("div");
    body.append(element("p", { className: "message" }, `${error.detail}${item} [${error.code}, ${error.status}]`), entry);
    explain(error, entry).catch(() => {});
  }
  byId("detail").hidden = false;
  render();
  byId("detail-title").focus({ preventScroll: true });
}

function close() {
  byId("detail").hidden = true;
  chosen = null;
  render();
  byId("request-list").querySelector(`[data-key="${CSS.escape(String(opener))}"]`)?.focus();
}

export function update(state) {
  for (const outcome of state.outcomes) {
    outcomes.unshift(outcome);
    const code = outcome.error?.code;
    const known = [...byId("filter-error").options].some((option) => option.value === code);
    if (code && !known) byId("filter-error").append(element("option", {}, code));
  }
  outcomes.length = Math.min(outcomes.length, KEPT);
  const changed = state.outcomes.length || living.length || state.living.length;
  living = state.living;
  if (changed) render();
}

export function forget() {
  outcomes.length = 0;
  living = [];
}

export const shown = render;

export function begin() {
  byId("legend").append(...STAGES.map((stage) => element("span", {}, element("i", { className: stage }), stage)));
  byId("filters").addEventListener("input", render);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("detail-close").addEventListener("click", close);
  byId("detail").addEventListener("keydown", (event) => event.key === "Escape" && close());
  byId("request-list").addEventListener("click", (event) => {
    const found = event.target.closest("button")?.dataset.key;
    const request = [...living, ...outcomes].find((one) => String(key(one)) === found);
    opener = found;
    if (request) open(request);
  });
}
