// The page: which view is shown, the token, and the stream that feeds the views while the page is visible.

import { byId, hasToken, listen, Problem, setToken } from "./api.js";
import * as errors from "./errors.js";
import * as now from "./now.js";
import * as requests from "./requests.js";
import * as tryIt from "./try.js";

const VIEWS = { now, requests, try: tryIt, errors };
let stop = null; // of the stream
let seen = 0; // number of the newest outcome that came

// "#/now" -> "now", where there is such a view
const viewOf = (hash) => (Object.hasOwn(VIEWS, hash.slice(2)) ? hash.slice(2) : null);

function show() {
  const name = viewOf(location.hash) ?? "now";
  if (!byId("sign-in").hidden) return;
  for (const other of Object.keys(VIEWS)) byId(other).hidden = other !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`${name}-title`).textContent} · Tectum`;
  VIEWS[name].shown?.();
}

function connection(text, lost = false) {
  const place = byId("connection");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("lost", lost);
}

// wrong: a token was given and is not the server's
function askForToken(wrong) {
  for (const name of Object.keys(VIEWS)) byId(name).hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-in-error").textContent = wrong ? "The server does not take this token." : "";
  byId("token").focus();
  connection("token needed", true);
}

function take(state) {
  if (state.totals.ended < seen) {
    seen = 0; // another server process: its numbers begin anew
    requests.forget();
    now.forget();
    follow();
    return;
  }
  seen = state.totals.ended;
  byId("version").textContent = state.version;
  connection(state.closing ? "the server is shutting down" : "live");
  now.update(state);
  requests.update(state);
}

async function follow() {
  stop?.abort();
  const mine = (stop = new AbortController());
  while (!mine.signal.aborted) {
    try {
      await listen(`/dashboard/events?since=${seen}`, mine.signal, (state) => {
        if (!byId("sign-in").hidden) {
          byId("sign-in").hidden = true;
          show();
        }
        take(state);
      });
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Problem && error.status === 401) {
        askForToken(hasToken());
        return;
      }
      connection(error instanceof Problem ? error.message : "not connected; trying again", true);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token").value = "";
  follow();
});

// a page that nobody looks at asks for nothing
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stop?.abort();
    connection("paused");
  } else {
    follow();
  }
});

window.addEventListener("hashchange", () => {
  if (!viewOf(location.hash)) return; // the link to the content
  show();
  byId("content").focus({ preventScroll: true });
  scrollTo(0, 0);
});

for (const view of Object.values(VIEWS)) view.begin?.();
show();
if (!document.hidden) follow();
