// The live page as a person meets it: a real server, real requests, Chromium. Screenshots are kept in `screenshots/`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { browser, PYTHON, ROOT, SCREENSHOTS, serve, temporary } from "./server.mjs";

const LIMIT = { timeout: 60_000 };
const PHOTO = join(ROOT, "src/tectum/demo/photos/cat.jpg");
let server;
let chromium;

before(async () => {
  chromium = await browser();
  server = await serve();
}, LIMIT);

after(async () => {
  await chromium?.close();
  if (server) assert.equal(await server.stop(), 0);
}, LIMIT);

// A fresh page; whatever goes wrong in it, and whatever it asks of another host, fails the test.
async function open(context, { url = server.url, view = "now", ready = true, ...options } = {}) {
  const session = await chromium.newContext({ viewport: { width: 1200, height: 850 }, ...options });
  context.after(() => session.close());
  const page = await session.newPage();
  page.faults = [];
  page.on("pageerror", (error) => page.faults.push(error.message));
  page.on("console", (message) => message.type() === "error" && page.faults.push(message.text()));
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("blob:")) page.faults.push(`asked ${request.url()}`);
  });
  page.setDefaultTimeout(15_000);
  await page.goto(`${url}/#/${view}`);
  if (ready) await page.getByText("live", { exact: true }).first().waitFor();
  return page;
}

async function encode(files, request = {}) {
  const form = new FormData();
  form.append("request", JSON.stringify({ items: files.map((_, index) => ({ type: "image", file: `f${index}` })), ...request }));
  files.forEach((file, index) => form.append(`f${index}`, new Blob([file]), `f${index}`));
  return fetch(`${server.url}/v1/encode`, { method: "POST", body: form });
}

const photo = () => readFileSync(PHOTO);
const screenshot = (page, name) => page.screenshot({ path: join(SCREENSHOTS, `${name}.png`) });
const tile = (page, name) => page.locator(".tile", { hasText: name }).locator("b");

test("the page holds no inline script, allows no other host, and says so in its policy", LIMIT, async () => {
  const answer = await fetch(`${server.url}/`);
  const policy = answer.headers.get("content-security-policy");
  assert.equal(answer.status, 200);
  assert.match(policy, /default-src 'none'/);
  assert.match(policy, /script-src 'self';/);
  assert.doesNotMatch(policy, /unsafe|https?:|\*/);
  const html = await answer.text();
  assert.doesNotMatch(html, /<script(?![^>]*\bsrc="\/dashboard)|<style|\son\w+=|\sstyle=|https?:/);
});

test("figures change while requests come, and the list shows them with a bar per stage", LIMIT, async (context) => {
  const page = await open(context);
  const before = Number(await tile(page, "requests ended").textContent());
  for (const count of [1, 2, 1]) assert.equal((await encode(Array(count).fill(photo()))).status, 200);
  await page.waitForFunction((wanted) => document.querySelector(".tile:last-child b").textContent === String(wanted), before + 3);
  await page.locator("#stages th", { hasText: "forward" }).waitFor();
  await page.locator("#reasons tr", { hasText: "delivered" }).waitFor();
  assert.equal(await page.locator("#workers tbody tr").count(), 1);
  await page.getByRole("link", { name: "Requests" }).click();
  const first = page.locator("#request-list button").first();
  await first.waitFor();
  assert.match(await first.textContent(), /delivered/);
  const widths = await first.locator(".bar i").evaluateAll((bars) => bars.map((bar) => [bar.className, bar.getBoundingClientRect().width]));
  assert.deepEqual(widths.map(([stage]) => stage), ["fetch", "prepare", "queue", "forward", "send"]);
  assert.ok(Math.max(...widths.map(([, width]) => width)) > 5, "a stage is seen");
  assert.deepEqual(page.faults, []);
});

test("the charts and the list go on under traffic", LIMIT, async (context) => {
  const page = await open(context);
  const samples = ["astronaut", "cat", "coffee", "rocket"].map((name) => readFileSync(join(ROOT, `src/tectum/demo/photos/${name}.jpg`)));
  const ended = Number(await tile(page, "requests ended").textContent());
  for (let number = 0; number < 160; number += 1) {
    const files = samples.slice(0, 1 + (number % 4));
    if (number % 40 === 39) files.push(Buffer.from("no picture"));
    assert.equal((await encode(files)).status, number % 40 === 39 ? 415 : 200);
  }
  await page.waitForFunction((wanted) => document.querySelector(".tile:last-child b").textContent === String(wanted), ended + 160);
  const strokes = await page.locator("#chart-throughput canvas").evaluate((canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(Array.from({ length: pixels.length / 4 }, (_, at) => pixels.slice(4 * at, 4 * at + 4).join())).size;
  });
  assert.ok(strokes > 20, "the chart is drawn");
  await screenshot(page, "now");
  await page.getByRole("link", { name: "Requests" }).click();
  await page.locator("#request-list button").nth(150).waitFor();
  await screenshot(page, "requests");
  assert.deepEqual(page.faults, []);
});

test("a click shows what is known of a request, and of its error what to do", LIMIT, async (context) => {
  const page = await open(context, { view: "requests" });
  assert.equal((await encode([photo(), Buffer.from("no picture")], { req_id: "broken-one" })).status, 415);
  assert.equal((await encode([photo()], { req_id: "held-one", delivery: { mode: "hold" } })).status, 200);
  await page.locator("#request-list button", { hasText: "held-one" }).first().click();
  const detail = page.locator("#detail");
  assert.match(await detail.textContent(), /state\s*staged/);
  assert.match(await detail.textContent(), /rows\s*\d+ of 192 bfloat16/);
  await page.locator("#filter-error").selectOption("unsupported_media");
  await page.locator("#filter-id").fill("broken");
  assert.match(await page.locator("#shown").textContent(), /^1 of/);
  await page.locator("#request-list button", { hasText: "broken-one" }).click();
  await detail.getByText("(item 1)").waitFor();
  await detail.getByRole("link", { name: "All about unsupported_media" }).waitFor();
  await screenshot(page, "request-error");
  await page.keyboard.press("Escape");
  assert.ok(await detail.isHidden());
  assert.equal(await page.evaluate(() => document.activeElement.dataset.key !== undefined), true, "the focus goes back");
  await page.locator("#filter-error").selectOption("");
  await page.locator("#filter-id").fill("");
  await page.locator("#filter-state").selectOption("staged");
  assert.match(await page.locator("#request-list").textContent(), /held-one/);
  await fetch(`${server.url}/v1/requests/held-one`, { method: "DELETE" });
  await page.locator("#filter-state").selectOption("client_release");
  await page.locator("#request-list button", { hasText: "held-one" }).waitFor();
  assert.deepEqual(page.faults, []);
});

// The same picture's norms and similarities, computed in Python from a call of its own.
async function independent(path, row) {
  const program = `
import json, sys, torch
from tectum import Client
with Client(sys.argv[1]) as client:
    rows = client.encode([sys.argv[2]]).rows.double()
norms = rows.norm(dim=1)
cosines = rows @ rows[int(sys.argv[3])] / norms / norms[int(sys.argv[3])]
print(json.dumps({"count": len(rows), "norm": norms[int(sys.argv[3])].item(), "cosines": cosines.tolist(),
                  "least": norms.min().item(), "most": norms.max().item()}))`;
  return JSON.parse(execFileSync(PYTHON, ["-c", program, server.url, path, String(row)], { cwd: ROOT }));
}

test("a dropped picture is encoded; norms and similarities are those that Python computes", LIMIT, async (context) => {
  const page = await open(context, { view: "try" });
  const data = await page.evaluateHandle((bytes) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(bytes)], "cat.jpg", { type: "image/jpeg" }));
    return transfer;
  }, [...photo()]);
  await page.dispatchEvent("#drop", "drop", { dataTransfer: data });
  await page.locator("#result").waitFor();
  const found = await independent(PHOTO, 7);
  assert.match(await page.locator("#facts").textContent(), new RegExp(`${found.count} of 192 \\(BF16\\)`));
  assert.equal(await page.locator("#scale span").first().textContent(), found.least.toFixed(2));
  assert.equal(await page.locator("#scale span").last().textContent(), found.most.toFixed(2));
  const map = page.locator("#map");
  await map.focus();
  for (let step = 0; step < 7; step += 1) await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  const text = await page.locator("#cell").textContent();
  assert.match(text, new RegExp(`^Row 7 .*norm ${found.norm.toFixed(3)};`));
  const order = [...found.cosines.keys()].filter((row) => row !== 7).sort((a, b) => found.cosines[b] - found.cosines[a]);
  assert.match(text, new RegExp(`most similar: ${order[0]} \\(${found.cosines[order[0]].toFixed(3)}\\)`));
  await screenshot(page, "try");
  await page.keyboard.press("Escape");
  assert.equal(await page.locator("#map-name").textContent(), "Row norms");
  const [download] = await Promise.all([page.waitForEvent("download"), page.locator("#download").click()]);
  const rows = readFileSync(await download.path());
  const header = JSON.parse(rows.subarray(8, 8 + Number(rows.readBigUInt64LE(0))));
  assert.deepEqual(header.rows.shape, [found.count, 192]);
  assert.deepEqual(page.faults, []);
});

// A clip of a red second and a blue second, and what Python gets for it.
const CLIP = `
import json, sys, av, numpy
from tectum import Client
with av.open(sys.argv[2], "w") as file:
    stream = file.add_stream("libvpx", rate=4)
    stream.width, stream.height, stream.pix_fmt = 140, 112, "yuv420p"
    for number in range(8):
        picture = numpy.zeros((112, 140, 3), numpy.uint8)
        picture[:, :, 0 if number < 4 else 2] = 220
        for packet in stream.encode(av.VideoFrame.from_ndarray(picture)):
            file.mux(packet)
    for packet in stream.encode():
        file.mux(packet)
with Client(sys.argv[1]) as client:
    embedding = client.encode([open(sys.argv[2], "rb").read()], modality="video")
print(json.dumps({"grid": embedding.grid_thw[0], "rows": len(embedding.rows)}))`;

test("a clip shows its frames, and the rows of each", LIMIT, async (context) => {
  const { folder, remove } = temporary();
  context.after(remove);
  const clip = join(folder, "clip.webm");
  const found = JSON.parse(execFileSync(PYTHON, ["-c", CLIP, server.url, clip], { cwd: ROOT }));
  assert.ok(found.grid[0] > 1, "the clip has several steps");
  const page = await open(context, { view: "try" });
  await page.locator("#file").setInputFiles(clip);
  await page.locator("#result").waitFor();
  assert.match(await page.locator("#facts").textContent(), new RegExp(`${found.grid[0]} steps of .*${found.rows} of 192`));
  const middle = () =>
    page.locator("#seen").evaluate((canvas) => [...canvas.getContext("2d").getImageData(canvas.width / 2 + 5, canvas.height / 2 + 5, 1, 1).data]);
  const [red, , blue] = await middle();
  assert.ok(red > 150 && blue < 100, "the first frame is red");
  await page.locator("#frame").fill(String(found.grid[0] - 1));
  const last = await middle();
  assert.ok(last[2] > 150 && last[0] < 100, "the last frame is blue");
  assert.match(await page.locator("#frame-name").textContent(), new RegExp(`${found.grid[0]} of ${found.grid[0]}`));
  assert.deepEqual(page.faults, []);
});

test("a file that is no picture is refused in words, with a way to the catalogue", LIMIT, async (context) => {
  const page = await open(context, { view: "try" });
  await page.locator("#file").setInputFiles({ name: "x.png", mimeType: "image/png", buffer: Buffer.from("no picture at all") });
  const error = page.locator("#try-error");
  await error.getByRole("link", { name: "What unsupported_media means" }).click();
  assert.equal(await page.locator("h1").textContent(), "unsupported_media");
  assert.deepEqual(page.faults.filter((fault) => !fault.includes("415")), []);
});

test("the catalogue is searched as one types", LIMIT, async (context) => {
  const page = await open(context, { view: "errors" });
  await page.locator("#error-list details").first().waitFor();
  const all = await page.locator("#error-list details").count();
  const listed = execFileSync(PYTHON, ["-m", "tectum", "explain", "--list"], { cwd: ROOT, encoding: "utf8" });
  assert.equal(all, listed.trim().split("\n").length);
  await page.locator("#error-search").fill("request_released");
  const found = page.locator("#error-list details", { hasText: "410" }).first();
  await found.locator("summary").click();
  assert.match(await found.textContent(), /A retry will not help/);
  assert.ok((await page.locator("#error-list details").count()) < all);
  await page.locator("#error-search").fill("zzzz");
  assert.match(await page.locator("#error-count").textContent(), /^0 of/);
  assert.deepEqual(page.faults, []);
});

test("dark and light follow the system, on a laptop and on a phone", LIMIT, async (context) => {
  const page = await open(context, { colorScheme: "dark" });
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.equal(await ground(), "rgb(21, 23, 26)");
  await screenshot(page, "now-dark");
  await page.emulateMedia({ colorScheme: "light" });
  assert.equal(await ground(), "rgb(255, 255, 255)");
  const phone = await open(context, { viewport: { width: 390, height: 800 }, view: "requests", colorScheme: "dark" });
  for (const view of ["now", "requests", "try", "errors"]) {
    await phone.goto(`${server.url}/#/${view}`);
    const wider = await phone.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(wider <= 0, `${view} is ${wider} pixels wider than a phone`);
  }
  await screenshot(phone, "phone");
  assert.deepEqual([...page.faults, ...phone.faults], []);
});

test("everything is reached with the keyboard and named for a screen reader", LIMIT, async (context) => {
  const page = await open(context);
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to content");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Requests", level: 1 }).waitFor();
  assert.equal(await page.locator("nav [aria-current=page]").textContent(), "Requests");
  for (const view of ["now", "requests", "try", "errors"]) {
    await page.goto(`${server.url}/#/${view}`);
    const nameless = await page.locator(`#${view}`).evaluate((section) =>
      [...section.querySelectorAll("button, input, select, canvas, img, meter, [role=img]")]
        .filter((one) => one.checkVisibility() && !one.parentElement.closest("[role=img]"))
        .filter((one) => !(one.ariaLabel || one.alt || one.labels?.length || one.textContent.trim() || one.querySelector("img[alt]")))
        .map((one) => one.outerHTML.slice(0, 80)),
    );
    assert.deepEqual(nameless, [], view);
  }
});

const openPages = async () => Number((await (await fetch(`${server.url}/metrics`)).text()).match(/^encoder_live_pages (\S+)/m)[1]);

async function noPageIsFed() {
  const deadline = Date.now() + 10_000;
  while ((await openPages()) > 0) assert.ok(Date.now() < deadline, "the stream goes on");
}

test("a page that is hidden or closed is fed nothing, and goes on when it is seen again", LIMIT, async (context) => {
  const page = await open(context);
  assert.ok((await openPages()) >= 1);
  const look = (away) =>
    page.evaluate((hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }, away);
  await look(true);
  await noPageIsFed();
  await look(false);
  await page.getByText("live", { exact: true }).first().waitFor();
  assert.equal(await openPages(), 1);
  await page.context().close();
  await noPageIsFed();
});

test("an open page costs the server under one percent of a core", LIMIT, async (context) => {
  const ticks = () => {
    const fields = readFileSync(`/proc/${server.pid}/stat`, "utf8").split(") ")[1].split(" ");
    return Number(fields[11]) + Number(fields[12]); // user and system time, in hundredths of a second
  };
  const page = await open(context);
  await page.waitForTimeout(1500);
  const [began, before] = [Date.now(), ticks()];
  await page.waitForTimeout(10_000);
  const share = (ticks() - before) / ((Date.now() - began) / 10);
  writeFileSync(join(SCREENSHOTS, "cost.txt"), `${(100 * share).toFixed(2)} % of a core with one page open\n`);
  assert.ok(share < 0.01, `${(100 * share).toFixed(2)} % of a core`);
});

test("with a token the page shows nothing until it is given, and keeps it to its tab", LIMIT, async (context) => {
  const { folder, remove } = temporary();
  context.after(remove);
  writeFileSync(join(folder, "token"), "correct-horse\n");
  const guarded = await serve("--token-file", join(folder, "token"));
  context.after(async () => assert.equal(await guarded.stop(), 0));
  assert.equal((await fetch(`${guarded.url}/`)).status, 401);
  for (const path of ["/dashboard/events", "/dashboard/errors"]) {
    assert.equal((await fetch(guarded.url + path)).status, 401, path);
    assert.equal((await fetch(guarded.url + path, { headers: { authorization: "Bearer wrong" } })).status, 401, path);
  }
  const page = await open(context, { url: guarded.url, view: "try", ready: false });
  await page.locator("#token").fill("wrong");
  await page.keyboard.press("Enter");
  await page.getByText("The server does not take this token.").waitFor();
  assert.ok(await page.locator("#try").isHidden());
  await page.locator("#token").fill("correct-horse");
  await page.keyboard.press("Enter");
  await page.locator("#samples button").first().click();
  await page.locator("#result").waitFor();
  assert.ok(!page.url().includes("correct-horse"));
  assert.equal((await page.context().cookies()).length, 0);
  await page.getByRole("link", { name: "Errors" }).click();
  await page.locator("#error-list details").first().waitFor();
});

test("--no-dashboard takes the page away", LIMIT, async (context) => {
  const bare = await serve("--no-dashboard");
  context.after(() => bare.stop());
  for (const path of ["/", "/dashboard/events", "/dashboard/static/main.js"]) {
    assert.equal((await fetch(bare.url + path)).status, 404, path);
  }
});

test("the vendored chart library is the package's own file", LIMIT, () => {
  for (const [vendored, packaged] of [["uPlot.iife.min.js", "dist/uPlot.iife.min.js"], ["uPlot.min.css", "dist/uPlot.min.css"], ["uPlot.LICENSE", "LICENSE"]]) {
    const here = readFileSync(join(ROOT, "src/tectum/serving/static/vendor", vendored));
    assert.deepEqual(here, readFileSync(join(ROOT, "tests/browser/node_modules/uplot", packaged)), vendored);
  }
});
