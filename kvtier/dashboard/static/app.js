
const TIERS = ["device", "host", "peer", "disk"];
const ROW = 28; // pixels a level of the tree
const THIN = 3; // boxes narrower than this are not drawn
const at = (id) => document.getElementById(id);
let token = sessionStorage.getItem("kvtier-token") || "";
let trusted = false;
let tree = null; // the root of what was loaded last, and what is zoomed to
let zoom = null;
let shownCache = null; // what the tree is of, and how many pages it had
let shownPages = 0;
let shown = null; // the node that is told about below the tree
let refused = ""; // why the latest change was not made
const hint = at("node").textContent;

if (location.hash.startsWith("#token=")) {
  token = location.hash.slice(7);
  sessionStorage.setItem("kvtier-token", token);
  history.replaceState(null, "", location.pathname);
}

// -- asking ---------------------------------------------------------------------------------------------------------

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { ...options, headers });
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error.message);
  return body;
}

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// -- numbers for people ---------------------------------------------------------------------------------------------

function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit += 1; }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

const count = (value) => Math.round(value).toLocaleString("en");
const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;
const percent = (value) => `${(100 * value).toFixed(1)} %`;

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function table(id, heads, rows, empty) {
  const place = at(id);
  const head = make("tr", {}, ...heads.map(([name, kind]) => make("th", { scope: "col", class: kind || "" }, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, n) => make("td", { class: heads[n][1] || "" }, cell))));
  const fresh = [make("thead", {}, head), make("tbody", {}, ...(rows.length ? body : [make("tr", {}, make("td", { colspan: heads.length }, empty))]))];
  if (fresh.map((each) => each.outerHTML).join("") === place.innerHTML) return;
  const held = [...place.querySelectorAll("button")].indexOf(document.activeElement);
  place.replaceChildren(...fresh);
  const buttons = [...place.querySelectorAll("button:not(:disabled)")];
  if (held >= 0) (buttons[Math.min(held, buttons.length - 1)] || place.parentElement).focus(); // whose button went goes on at the next
}

// -- overview -------------------------------------------------------------------------------------------------------

function showTiers(tiers) {
  const fastestFirst = TIERS.filter((name) => tiers[name]).map((name) => [name, tiers[name]]);
  at("tiers").replaceChildren(...fastestFirst.map(([name, tier]) => {
    const lacking = tier.parked_bytes || 0; // what the file system has no room for
    const total = (tier.budget_bytes || tier.capacity_bytes || 0) - lacking;
    const used = total - tier.free_bytes;
    const share = total ? used / total : 0;
    const fill = make("i", { class: `i-${name}` });
    fill.style.width = `${100 * share}%`;
    const short = lacking ? ` – no room on the file system for ${bytes(lacking)} more` : "";
    const state = tier.sick ? ` – ${tier.sick}` : tier.state && tier.state !== "ready" ? ` – ${tier.state}` : short;
    return make("div", { class: "tier" },
      make("div", {}, make("strong", {}, name + state), make("span", {}, `${bytes(used)} of ${bytes(total)} (${percent(share)})`)),
      make("div", { class: "track", role: "meter", "aria-label": `${name} used`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) }, fill));
  }));
}

function showHits(steps) {
  const asked = steps.reduce((sum, s) => sum + s.seconds * s.asked_s, 0);
  const hit = Object.fromEntries(TIERS.map((t) => [t, steps.reduce((sum, s) => sum + s.seconds * s.hit_s[t], 0)]));
  const all = TIERS.reduce((sum, t) => sum + hit[t], 0);
  at("hits-text").textContent = asked ? `${percent(all / asked)} of the tokens asked for: ${TIERS.filter((t) => hit[t]).map((t) => `${t} ${percent(hit[t] / asked)}`).join(", ") || "none"}` : "no prompts in that time";
  const svg = at("hits"), wide = 600 / Math.max(1, steps.length), bars = [];
  steps.forEach((step, n) => {
    let low = 140;
    for (const tier of TIERS) {
      const high = step.asked_s ? 140 * Math.min(1, step.hit_s[tier] / step.asked_s) : 0;
      if (!high) continue;
      low -= high;
      bars.push(shape("rect", { x: n * wide, y: low, width: wide, height: high, class: `i-${tier}` }));
    }
  });
  svg.replaceChildren(...bars);
  at("legend").replaceChildren(...TIERS.map((t) => make("span", {}, make("i", { class: `i-${t}` }), t)));
}

function showCaches(caches) {
  const select = at("cache"), chosen = select.value;
  const known = caches.filter((c) => !c.retired).sort((a, b) => b.pages - a.pages);
  const names = known.map((c) => c.id).join();
  if (select.dataset.names === names && document.activeElement === select) return; // it may be open
  select.dataset.names = names;
  select.replaceChildren(...known.map((c) => make("option", { value: c.id }, `${c.model} ${c.kv_dtype} · ${many(c.pages, "page")} · ${c.id.slice(0, 8)}`)));
  if (known.some((c) => c.id === chosen)) select.value = chosen;
}

async function overview() {
  try {
    const { status, caches, history: steps, trusted: may } = await ask("/v1/overview");
    if (may !== trusted) {
      trusted = may;
      if (shown) show(shown); // its button comes or goes
    }
    at("version").textContent = status.version;
    at("state").className = "";
    at("state").removeAttribute("role");
    at("state").textContent = `up ${span(status.uptime_s)} · ${many(status.pages, "page")} · ${many(status.instances.length, "engine")} · ${bytes(status.rss_bytes)} resident`;
    at("login").hidden = trusted;
    at("trust").textContent = refused || (trusted ? "The token is good: pins can be changed here." : token ? "That token is not this daemon's." : "To change pins, open the address that kvtierctl dashboard prints, or give its token.");
    showTiers(status.tiers);
    showHits(steps);
    showCaches(caches);
    table("engines", [["engine"], ["holds", "n"], ["of", "n"], ["leases", "n"], ["reservations", "n"]],
      status.instances.map((i) => [i.instance, bytes(i.held_bytes), bytes(i.cap_bytes), count(i.leases), count(i.reservations)]), "none attached");
    table("peers", [["peer"], ["address"], ["state"]],
      (status.peers || []).map((p) => [p.name, p.address, p.up ? "up" : p.why === undefined ? "down" : `down: ${p.why || "not reached yet"}`]), "none configured");
    await pins();
    await curve();
    const grew = caches.some((c) => c.id === shownCache && c.pages !== shownPages);
    if (at("cache").value !== (shownCache || "") || shownCache === null || (grew && !watched())) await load();
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  at("state").className = "bad";
  at("state").setAttribute("role", "alert");
  at("state").textContent = `no answer: ${error.message}`;
}

async function pins() {
  const { pins: held } = await ask("/v1/pins");
  table("pins", [["pin"], [""], ["pages", "n"], ["bytes", "n"], ["priority", "n"], ["left", "n"]], held.map((p) => {
    const end = make("button", { type: "button", "aria-label": `Unpin ${p.pin}`, onclick: () => change(`/v1/pins/${p.pin}`, { method: "DELETE" }) }, "Unpin");
    end.disabled = !trusted;
    return [p.pin, end, count(p.pages), bytes(p.held_bytes), String(p.priority), span(p.left_s)];
  }), "none");
}

async function change(path, options) {
  try {
    refused = "";
    await ask(path, options);
    await pins();
  } catch (error) {
    at("trust").textContent = refused = error.message;
  }
}

// -- the curve ------------------------------------------------------------------------------------------------------

function shape(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

async function curve() {
  const { pools } = await ask(`/v1/curve?add=${Number(at("add").value) * 2 ** 30}`);
  const pool = pools.sort((a, b) => b.requests - a.requests)[0];
  if (!pool || !pool.points.length) return;
  const said = [["now", "host as it is"], ["with_disk", "host and disk"], ["added", "with that much more"]]
    .flatMap(([key, what]) => pool[key].map((point) => `${what} (${bytes(point.bytes)}) ${percent(point.hit_ratio)}`));
  at("curve-text").textContent = `${pool.model}, ${many(pool.requests, "request")}: hits with ${said.join(", ")}`;
  const most = Math.log2(1 + Math.max(...[...pool.points, ...pool.added].map((point) => point.bytes)));
  const x = (point) => 600 * Math.log2(1 + point.bytes) / most, y = (point) => 140 * (1 - point.hit_ratio);
  const line = shape("polyline", { points: [...pool.points, ...pool.added].sort((a, b) => a.bytes - b.bytes).map((point) => `${x(point)},${y(point)}`).join(" ") });
  const here = pool.now.map((point) => shape("line", { x1: x(point), x2: x(point), y1: 0, y2: 140 }));
  at("curve").replaceChildren(...here, line);
}

// -- the tree -------------------------------------------------------------------------------------------------------

function grown(nodes) {
  const root = { level: -1, pages: 0, children: [], parent: null, size: 0, tiers: {} };
  let last = root;
  for (const row of nodes) {
    while (last.level >= row.level) last = last.parent;
    const node = { ...row, children: [], parent: last };
    last.children.push(node);
    last = node;
  }
  const size = (node) => { node.size = Math.max(1, node.pages) + node.children.reduce((sum, child) => sum + size(child), 0); return node.size; };
  size(root);
  return root;
}

// Whether somebody looks at a part of the tree, which is not to go from under their hands.
function watched() {
  const field = at("icicle"), told = at("node");
  return zoom !== tree || [field, told].some((each) => each.contains(document.activeElement) || each.matches(":hover"));
}

async function load() {
  const wanted = at("cache").value;
  const data = wanted ? await ask(`/v1/tree?cache=${wanted}&depth=64&limit=4000`) : { cache: {}, nodes: [] };
  if (wanted !== at("cache").value) return; // another one was chosen meanwhile
  [shownCache, shownPages, shown] = [wanted, data.cache.pages || 0, null];
  at("node").textContent = hint;
  tree = grown(data.nodes);
  tree.pageTokens = data.cache.page_tokens;
  zoom = tree;
  draw();
  top(data.nodes);
}

const tierOf = (node) => TIERS.find((tier) => node.tiers[tier]) || "none";

function said(node) {
  const tokens = tree.pageTokens;
  const where = TIERS.filter((t) => node.tiers[t]).map((t) => `${count(node.tiers[t])} in ${t}`).join(", ") || "nowhere yet";
  const text = node.tokens ? ` Begins with tokens ${node.tokens.slice(0, 12).join(" ")}.` : "";
  return `Tokens ${count(node.first_page * tokens)} to ${count((node.first_page + node.pages) * tokens)}: ${many(node.pages, "page")}, ${where}; heat ${node.heat.toFixed(1)}, idle ${span(node.idle_s)}, ${many(node.leases, "lease")}, ${many(node.children.length, "branch", "branches")}.${text}`;
}

function draw() {
  const field = at("icicle"), width = field.clientWidth, boxes = [];
  let deepest = 0;
  const place = (node, left, share, level) => {
    if (share < THIN) return;
    if (node.parent) {
      const box = make("div", { class: `box i-${tierOf(node)}`, role: "treeitem", tabindex: "-1", "aria-level": level + 1, "aria-label": said(node) }, share > 70 ? many(node.pages * tree.pageTokens, "token") : share > 30 ? count(node.pages * tree.pageTokens) : "");
      Object.assign(box.style, { left: `${left}px`, width: `${share}px`, top: `${level * ROW}px` });
      const strength = Math.min(1, Math.log1p(node.heat) / 3);
      box.style.setProperty("--strength", `${30 + 70 * strength}%`);
      box.classList.toggle("pale", strength < 0.75);
      box.node = node;
      node.box = box;
      boxes.push(box);
      deepest = Math.max(deepest, level + 1);
    }
    let x = left;
    const total = node.children.reduce((sum, child) => sum + child.size, 0);
    const below = node.parent ? share * total / node.size : share;
    for (const child of node.children) {
      const part = below * child.size / Math.max(1, total);
      place(child, x, part, node.parent ? level + 1 : level);
      x += part;
    }
  };
  const clear = (node) => { node.box = null; node.children.forEach(clear); };
  clear(tree);
  place(zoom, 0, width, 0);
  field.replaceChildren(...boxes);
  field.style.height = `${Math.max(2, deepest) * ROW}px`;
  if (boxes.length) boxes[0].tabIndex = 0;
  at("out").disabled = zoom === tree;
}

function focus(node) {
  if (!node || !node.box) return;
  document.querySelectorAll("#icicle .box[tabindex='0']").forEach((box) => { box.tabIndex = -1; });
  node.box.tabIndex = 0;
  node.box.focus();
}

function into(node) {
  zoom = node;
  draw();
  focus(node.parent ? node : node.children[0]);
}

function beside(node, step) {
  const row = node.parent.children.filter((each) => each.box);
  return row[row.indexOf(node) + step];
}

const KEYS = {
  ArrowRight: (node) => focus(beside(node, 1)),
  ArrowLeft: (node) => focus(beside(node, -1)),
  ArrowDown: (node) => focus(node.children.find((child) => child.box)),
  ArrowUp: (node) => focus(node.parent),
  Enter: (node) => into(node),
  Escape: () => into(zoom.parent || tree),
};

at("icicle").addEventListener("keydown", (event) => {
  const act = KEYS[event.key];
  if (!act || !event.target.node) return;
  event.preventDefault();
  act(event.target.node);
});
at("icicle").addEventListener("click", (event) => { if (event.target.node) into(event.target.node); });
at("icicle").addEventListener("focusin", (event) => { if (event.target.node) show(event.target.node); });
at("icicle").addEventListener("mouseover", (event) => { // what was chosen stays, on the way to its button
  if (event.target.node && !at("icicle").contains(document.activeElement)) show(event.target.node);
});

function show(node) {
  shown = node;
  const more = [];
  if (node.chain && trusted) {
    const body = JSON.stringify({ cache: shownCache, chain: node.chain });
    more.push(" ", make("button", { type: "button", onclick: () => change("/v1/pins", { method: "POST", body }) }, "Pin for an hour"));
  }
  at("node").replaceChildren(said(node), ...more);
}

function top(nodes) {
  const hottest = [...nodes].sort((a, b) => b.heat - a.heat).slice(0, 10);
  table("top", [["tokens", "n"], ["from", "n"], ["tier"], ["heat", "n"], ["idle", "n"], ["leases", "n"], ["branches", "n"]],
    hottest.map((n) => [count(n.pages * tree.pageTokens), count(n.first_page * tree.pageTokens), tierOf(n), n.heat.toFixed(1), span(n.idle_s), count(n.leases), count(n.children)]), "nothing is cached");
}

// -- start ----------------------------------------------------------------------------------------------------------

at("cache").addEventListener("change", () => load().catch(complain));
at("add").addEventListener("change", () => curve().catch(() => {}));
at("out").addEventListener("click", () => into(zoom.parent || tree));
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value.trim().replace(/^.*#token=/, "");
  sessionStorage.setItem("kvtier-token", token);
  at("token").value = "";
  overview().then(() => { if (trusted) at("pins").parentElement.focus(); }); // the form went, and the focus with it
});
addEventListener("resize", () => {
  const held = document.activeElement.node;
  if (tree) draw();
  if (held) focus(held.box ? held : zoom.children[0]);
});
addEventListener("visibilitychange", () => { if (!document.hidden) overview(); });
overview();
setInterval(() => { if (!document.hidden) overview(); }, 5000); // nobody sees a tab in the background
