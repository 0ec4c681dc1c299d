// The view Now: figures of this second, and charts of the last minutes that the page was open.

import { byId, bytes, count, element, milliseconds, STAGES } from "./api.js";

const KEPT = 300; // seconds in a chart
const history = []; // [time, pictures/s, rows/s, live %, patches %, bytes %]
const charts = {};
let last = null;
const dark = matchMedia("(prefers-color-scheme: dark)");

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function chart(id, series, scales) {
  const place = byId(id);
  charts[id]?.destroy();
  const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") }, size: 46 };
  charts[id] = new uPlot({
    width: place.clientWidth || 320,
    height: 170,
    cursor: { show: false },
    legend: { live: false },
    scales,
    axes: [{ ...axis, size: 28 }, { ...axis, scale: series[0].scale }, ...(series[1].scale === "rows" ? [{ ...axis, scale: "rows", side: 1, size: 58, grid: { show: false } }] : [])],
    series: [{}, ...series.map((one) => ({ width: 1.5, points: { show: false }, ...one, stroke: color(one.stroke) }))],
  }, [[]], place);
}

function draw() {
  const zero = { range: (plot, low, high) => [0, Math.max(high || 0, 1)] };
  const percent = { range: (plot, low, high) => [0, Math.max(high || 0, 10)] };
  chart("chart-throughput", [
    { label: "items per second (left)", scale: "items", stroke: "forward" },
    { label: "rows per second (right)", scale: "rows", stroke: "send" },
  ], { items: zero, rows: zero });
  chart("chart-load", [
    { label: "live requests", scale: "percent", stroke: "prepare" },
    { label: "queued patches", scale: "percent", stroke: "queue" },
    { label: "staged bytes", scale: "percent", stroke: "fetch" },
  ], { percent });
  redraw();
}

function redraw() {
  if (byId("now").hidden || !charts["chart-load"]) return;
  const column = (index) => history.map((point) => point[index]);
  charts["chart-throughput"].setData([column(0), column(1), column(2)]);
  charts["chart-load"].setData([column(0), column(3), column(4), column(5)]);
}

function tile(name, value, used = null, limit = null) {
  const made = element("div", { className: "tile" }, element("b", {}, value), element("span", {}, name));
  if (limit) made.append(element("meter", { min: 0, max: limit, high: 0.8 * limit, value: used, "aria-label": `${name}, of its limit` }));
  return made;
}

function table(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => element("tr", {}, ...cells)));
}

const name = (text) => element("th", { scope: "row" }, text);
const number = (text) => element("td", { className: "number" }, text);

function quantiles(stage, [half, most], longest) {
  const bars = element("div", { className: "quantiles" });
  for (const value of [most, half]) {
    const bar = element("i", { className: stage });
    bar.style.width = `${(100 * value) / longest}%`;
    bars.append(bar);
  }
  return [name(stage), number(milliseconds(half)), number(milliseconds(most)), element("td", {}, bars)];
}

export function update(state) {
  const live = Object.values(state.live).reduce((sum, one) => sum + one, 0);
  const seconds = last ? Math.max(state.at - last.at, 0.001) : null;
  const rate = (key) => (seconds ? (state.totals[key] - last.totals[key]) / seconds : 0);
  const [items, rows] = [rate("items"), rate("rows")];
  const share = (used, limit) => (100 * used) / limit;
  const { limits } = state;
  history.push([state.at, items, rows, share(live, limits.live), share(state.queued_patches, limits.queued_patches), share(state.staged_bytes, limits.staged_bytes)]);
  if (history.length > KEPT) history.shift();
  last = state;

  const { model } = state;
  byId("model").textContent = [model.id, model.family, `${model.width} wide`, model.dtype, `on ${model.device}`].filter(Boolean).join(" · ");
  byId("tiles").replaceChildren(
    tile(`live requests of ${count(limits.live)}`, count(live), live, limits.live),
    tile(`queued patches of ${count(limits.queued_patches)}`, count(state.queued_patches), state.queued_patches, limits.queued_patches),
    tile(`staged of ${bytes(limits.staged_bytes)}`, bytes(state.staged_bytes), state.staged_bytes, limits.staged_bytes),
    tile("items per second", items.toFixed(1)),
    tile("rows per second", count(rows)),
    tile("requests ended", count(state.totals.ended)),
  );
  const known = STAGES.concat("total").filter((stage) => state.stages[stage]);
  const longest = Math.max(...known.map((stage) => state.stages[stage][1]), 1e-6);
  table("stages", known.length ? known.map((stage) => quantiles(stage, state.stages[stage], longest)) : [[name("no request yet")]]);
  table("live", Object.entries(state.live).map(([key, value]) => [name(key), number(count(value))]));
  const reasons = Object.entries(state.releases).map(([key, value]) => [name(key), number(count(value))]);
  const refusals = Object.entries(state.refusals).map(([key, value]) => [name(`refused: ${key}`), number(count(value))]);
  table("reasons", reasons.length + refusals.length ? [...reasons, ...refusals] : [[name("none yet")]]);
  table("workers", state.workers.map((worker) => [
    name(String(worker.lane)),
    element("td", {}, worker.pid ? (worker.pending ? "working" : "idle") : "being started"),
    number(worker.pid ? String(worker.pid) : "–"),
    number(count(worker.pending)),
    number(count(worker.queued_patches)),
  ]));
  byId("restarts").textContent = state.restarts ? `${state.restarts} restart(s) since the server started` : "";
  redraw();
}

export function forget() {
  history.length = 0;
  last = null;
}

export const shown = draw;

export function begin() {
  dark.addEventListener("change", () => byId("now").hidden || draw());
  let waiting = null;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => byId("now").hidden || draw(), 150);
  });
}
