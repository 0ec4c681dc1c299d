// A Tectum server as a child process, and a browser, for the tests of the live page.

import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const ROOT = fileURLToPath(new URL("../../", import.meta.url));
export const SCREENSHOTS = fileURLToPath(new URL("screenshots/", import.meta.url));
export const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
export const MODEL = join(ROOT, "src/tectum/demo/model");

// Runs `tectum serve MODEL` with `flags` on a free port; resolves once it is ready.
export async function serve(...flags) {
  const command = ["-m", "tectum", "serve", MODEL, "--port", "0", "--forward-threads", "1", ...flags];
  const server = spawn(PYTHON, command, { cwd: ROOT, stdio: ["ignore", "inherit", "pipe"] });
  const said = [];
  const exited = new Promise((resolve) => server.once("exit", resolve).once("error", (error) => said.push(error.message)));
  for await (const line of createInterface({ input: server.stderr })) {
    said.push(line);
    if (line.startsWith("ready on ")) {
      server.stderr.resume();
      const stop = async () => {
        server.kill("SIGTERM");
        return exited;
      };
      return { url: line.slice("ready on ".length).trim(), pid: server.pid, stop };
    }
  }
  throw new Error(`the server ended while starting:\n${said.join("\n")}`);
}

export async function browser() {
  if (!existsSync(CHROMIUM)) {
    throw new Error(`no browser at ${CHROMIUM}: apt-get install chromium, or set CHROMIUM to one`);
  }
  return chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox"] });
}

export function temporary() {
  const folder = mkdtempSync(join(tmpdir(), "tectum-browser-"));
  return { folder, remove: () => rmSync(folder, { recursive: true }) };
}
