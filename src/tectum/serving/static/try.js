// The view Try it: one picture or clip through the encoder, and its rows on a map. Nothing leaves for another host.

import { byId, bytes, call, element, Problem, STAGES } from "./api.js";
import { norms, read, similarities } from "./rows.js";

const SAMPLES = ["cat", "coffee", "astronaut", "rocket"];
let shownNow = null; // { embedding, time, height, width (in rows), patches, frames, frame, chosen, cursor }

const status = (text) => (byId("try-status").textContent = text);

async function encode(file) {
  byId("result").hidden = true;
  byId("try-error").replaceChildren();
  status(`Encoding ${file.name || "the picture"}, ${bytes(file.size)} …`);
  const type = file.type.startsWith("video/") ? "video" : "image";
  const form = new FormData();
  const request = { req_id: `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`, items: [{ type, file: "media" }] };
  form.append("request", JSON.stringify(request));
  form.append("media", file, "media");
  const started = performance.now();
  try {
    const response = await call("/v1/encode", { method: "POST", body: form });
    const buffer = await response.arrayBuffer();
    const elapsed = performance.now() - started;
    const frames = type === "video" ? await framesOf(file, read(buffer).grid[0][0]) : [await createImageBitmap(file)];
    present(buffer, response, elapsed, frames);
  } catch (error) {
    status("");
    refuse(error);
  }
}

function refuse(error) {
  const code = error instanceof Problem ? error.body.code : null;
  const more = code ? [" ", element("a", { href: `/errors/${code}` }, `What ${code} means`)] : [];
  byId("try-error").append(element("p", { className: "message" }, error.message, ...more));
}

// Stills of a clip, one for each step of its grid, at the middle of the span that the step stands for.
async function framesOf(file, steps) {
  const video = element("video", { muted: true, preload: "auto", src: URL.createObjectURL(file) });
  try {
    await new Promise((resolve, reject) => {
      video.onloadeddata = resolve;
      video.onerror = () => reject(new Error("This browser cannot show the clip; its rows came all the same"));
    });
    const stills = [];
    for (let step = 0; step < steps; step += 1) {
      const seeked = new Promise((resolve) => (video.onseeked = resolve));
      video.currentTime = ((step + 0.5) / steps) * video.duration;
      await seeked;
      stills.push(await createImageBitmap(video));
    }
    return stills;
  } finally {
    URL.revokeObjectURL(video.src);
  }
}

// Server-Timing of the answer -> [[stage, milliseconds], …]
function timing(response) {
  const entries = (response.headers.get("server-timing") ?? "").split(",").map((one) => one.trim().split(";dur="));
  const known = Object.fromEntries(entries.filter((entry) => entry.length === 2));
  return STAGES.filter((stage) => stage in known).map((stage) => [stage, Number(known[stage])]);
}

function present(buffer, response, elapsed, frames) {
  const embedding = read(buffer);
  const [time, patchHeight, patchWidth] = embedding.grid[0];
  const merge = Math.sqrt((time * patchHeight * patchWidth) / embedding.count);
  shownNow = { embedding, time, height: patchHeight / merge, width: patchWidth / merge, merge, frames, frame: 0, chosen: null, cursor: 0 };
  const times = timing(response);
  const source = `${frames[0].width} × ${frames[0].height} pixels`;
  const facts = [
    ["as sent", source],
    ["grid", `${time > 1 ? `${time} steps of ` : ""}${patchWidth} × ${patchHeight} patches, ${merge} × ${merge} of them a row`],
    ["rows", `${embedding.count} of ${embedding.width} (${embedding.dtype})`],
    ["size", bytes(buffer.byteLength)],
    ["request", response.headers.get("x-tectum-req-id")],
  ];
  byId("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  const total = times.reduce((sum, [, taken]) => sum + taken, 0);
  byId("times").replaceChildren(...times.map(([stage, taken]) => {
    const part = element("i", { className: stage });
    part.style.width = `${(100 * taken) / total}%`;
    return part;
  }));
  byId("times-text").textContent = `${times.map(([stage, taken]) => `${stage} ${taken.toFixed(1)}`).join(" · ")} ms on the server; ${elapsed.toFixed(0)} ms seen from here`;
  byId("frames").hidden = time === 1;
  byId("frame").max = time - 1;
  byId("frame").value = 0;
  URL.revokeObjectURL(byId("download").href);
  byId("download").href = URL.createObjectURL(new Blob([buffer], { type: "application/x-safetensors" }));
  byId("result").hidden = false;
  status(`${embedding.count} rows in ${elapsed.toFixed(0)} ms`);
  draw();
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function drawSeen() {
  const { frames, frame, height, width, merge } = shownNow;
  const canvas = byId("seen");
  const cell = Math.max(12, Math.round(640 / width));
  [canvas.width, canvas.height] = [cell * width, cell * height];
  canvas.setAttribute("aria-label", `The picture in ${width * merge} by ${height * merge} patches`);
  const pen = canvas.getContext("2d");
  pen.drawImage(frames[frame], 0, 0, canvas.width, canvas.height);
  const lines = (step, style, thickness) => {
    pen.strokeStyle = style;
    pen.lineWidth = thickness;
    pen.beginPath();
    for (let x = step; x < canvas.width - 1; x += step) pen.moveTo(x, 0), pen.lineTo(x, canvas.height);
    for (let y = step; y < canvas.height - 1; y += step) pen.moveTo(0, y), pen.lineTo(canvas.width, y);
    pen.stroke();
  };
  lines(cell / merge, "rgba(255, 255, 255, 0.28)", 1);
  lines(cell, "rgba(255, 255, 255, 0.75)", 1.5);
}

function drawMap() {
  const { embedding, frame, height, width, chosen, cursor } = shownNow;
  const values = chosen === null ? norms(embedding) : similarities(embedding, chosen);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const [from, to] = [channels(css("low")), channels(css("high"))];
  const canvas = byId("map");
  const cell = Math.max(12, Math.round(640 / width));
  [canvas.width, canvas.height] = [cell * width, cell * height];
  const pen = canvas.getContext("2d");
  for (let index = 0; index < height * width; index += 1) {
    const share = (values[frame * height * width + index] - low) / (high - low || 1);
    pen.fillStyle = `rgb(${from.map((part, at) => Math.round(part + share * (to[at] - part))).join()})`;
    pen.fillRect((index % width) * cell, Math.floor(index / width) * cell, cell, cell);
  }
  const outline = (row, style) => {
    const place = row - frame * height * width;
    if (place < 0 || place >= height * width) return;
    pen.strokeStyle = style;
    pen.lineWidth = 3;
    pen.strokeRect((place % width) * cell + 1.5, Math.floor(place / width) * cell + 1.5, cell - 3, cell - 3);
  };
  if (chosen !== null) outline(chosen, css("send"));
  if (document.activeElement === canvas) outline(cursor, css("link"));
  const name = chosen === null ? "Row norms" : `Cosine similarity to row ${chosen}`;
  byId("map-name").textContent = name;
  canvas.setAttribute("aria-label", `${name}, ${width} by ${height} cells`);
  const ends = byId("scale").querySelectorAll("span");
  ends[0].textContent = low.toFixed(2);
  ends[1].textContent = high.toFixed(2);
}

function draw() {
  const { frame, time } = shownNow;
  byId("frame-name").textContent = `${frame + 1} of ${time}`;
  drawSeen();
  drawMap();
}

function choose(row) {
  shownNow.chosen = row;
  const { embedding, width, height } = shownNow;
  if (row === null) {
    byId("cell").textContent = "";
  } else {
    const found = similarities(embedding, row);
    const order = [...found.keys()].filter((other) => other !== row).sort((a, b) => found[b] - found[a]).slice(0, 5);
    const place = row % (width * height);
    byId("cell").textContent =
      `Row ${row} (line ${Math.floor(place / width) + 1}, column ${(place % width) + 1}): norm ${norms(embedding)[row].toFixed(3)}; ` +
      `most similar: ${order.map((other) => `${other} (${found[other].toFixed(3)})`).join(", ")}`;
  }
  drawMap();
}

function onKey(event) {
  if (!shownNow) return;
  const { width, height, frame } = shownNow;
  const first = frame * width * height;
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width };
  if (event.key in moves) {
    const next = Math.max(first, shownNow.cursor) + moves[event.key];
    if (next >= first && next < first + width * height) shownNow.cursor = next;
    drawMap();
  } else if (event.key === "Enter" || event.key === " ") {
    choose(Math.max(first, shownNow.cursor));
  } else if (event.key === "Escape") {
    choose(null);
  } else {
    return;
  }
  event.preventDefault();
}

async function takeSample(name) {
  const blob = await (await call(`/dashboard/static/samples/${name}.jpg`)).blob();
  encode(new File([blob], `${name}.jpg`, { type: "image/jpeg" }));
}

export const shown = () => shownNow && draw();

export function begin() {
  for (const name of SAMPLES) {
    const button = element("button", { type: "button" }, element("img", { src: `/dashboard/static/samples/${name}.jpg`, alt: `sample: ${name}` }));
    button.addEventListener("click", () => takeSample(name).catch(refuse));
    byId("samples").append(button);
  }
  byId("file").addEventListener("change", (event) => event.target.files[0] && encode(event.target.files[0]));
  const drop = byId("drop");
  drop.addEventListener("dragover", (event) => (event.preventDefault(), drop.classList.add("over")));
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files[0]) encode(event.dataTransfer.files[0]);
  });
  byId("frame").addEventListener("input", (event) => {
    shownNow.frame = Number(event.target.value);
    draw();
  });
  const map = byId("map");
  map.addEventListener("click", (event) => {
    const { width, height, frame } = shownNow;
    const box = map.getBoundingClientRect();
    const column = Math.min(width - 1, Math.floor(((event.clientX - box.left) / box.width) * width));
    const line = Math.min(height - 1, Math.floor(((event.clientY - box.top) / box.height) * height));
    shownNow.cursor = frame * width * height + line * width + column;
    choose(shownNow.cursor);
  });
  map.addEventListener("keydown", onKey);
  for (const kind of ["focus", "blur"]) map.addEventListener(kind, () => shownNow && drawMap());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shownNow && draw());
}
