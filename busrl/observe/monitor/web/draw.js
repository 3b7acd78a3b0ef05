"use strict";
// Drawings of the page: the run as a graph, curves over steps or time, the last minutes. Texts are set as text, never as markup.

const make = (space) => (tag, attributes = {}, ...children) => {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.filter((one) => one != null));
  return made;
};
const el = make(""), svg = make("http://www.w3.org/2000/svg");
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const known = (value) => typeof value === "number" && isFinite(value);

function short(value, digits = 1) {
  if (!known(value)) return "-";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= size) return (value / size).toFixed(1) + unit;
  return Number.isInteger(value) && digits === 1 ? String(value) : value.toFixed(digits);
}
const passed = (s) => !known(s) ? "-" : s < 0.01 ? "0 s" : s < 1 ? `${Math.round(s * 1000)} ms` : s < 100 ? `${s.toFixed(1)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
const percent = (share) => known(share) ? `${Math.round(share * 100)}%` : "-";

// -- the run as a graph: four stages along the ring's states, the others below, one bus under all --------------------

const STAGES = [["scheduler"], ["agent", "serve", "atropos", "rollout"], ["reward"], ["learner", "rank"]];
const USUAL = ["scheduler", "rollout", "reward", "learner"];
const BETWEEN = [["queued", "queued"], ["generated", "generated"], ["rewarded", "rewarded"]]; // state, and whose entries flow
const NODE = 62;

class Graph {
  constructor(root, said) { this.root = root; this.said = said; this.shape = ""; }

  show(p) {
    const groups = {};
    for (const row of p.web.rows) if (row.role !== "bus") (groups[row.role || row.name] ??= []).push(row);
    const width = Math.max(300, this.root.clientWidth || this.root.parentNode.clientWidth), tall = width < 720;
    const shape = JSON.stringify([width, Object.entries(groups).map(([role, rows]) => [role, rows.length])]);
    if (shape !== this.shape) { this.shape = shape; this.build(groups, width, tall); }
    for (const [role, node] of Object.entries(this.nodes)) this.fill(node, role, groups[role] || [], p);
    this.flows(p);
    this.said.textContent = p.web.rows.length ? `${p.web.rows.length} processes. Numbers at arrows: samples that come into the state in a second, and those that are in it. At the bus: what a process sends.`
      : p.web.over ? `Nothing runs${p.web.ended ? ": " + p.web.ended : ""}.` : "No process is known yet.";
  }

  build(groups, width, tall) {
    this.nodes = {}; this.edges = []; this.root.replaceChildren();
    const columns = STAGES.map((roles) => roles.filter((role) => groups[role]));
    columns.forEach((column, at) => { if (!column.length) column.push(USUAL[at]); });
    const others = Object.keys(groups).filter((role) => !STAGES.flat().includes(role)).sort();
    const height = tall ? this.tall(columns, others, width) : this.wide(columns, others, width);
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.style.height = `${height}px`;
  }

  wide(columns, others, width) {
    const gap = Math.max(96, width * 0.11), w = (width - 3 * gap - 2) / 4, top = 40, deep = Math.max(...columns.map((one) => one.length));
    const rail = top + deep * (NODE + 12) + 34, x = (at) => 1 + at * (w + gap);
    this.rail(`M0 ${rail}H${width}`, width, rail + 17, "end");
    columns.forEach((roles, at) => roles.forEach((role, k) => {
      const y = top + k * (NODE + 12), down = x(at) + 14 + 150 * k;
      this.drop(role, `M${down} ${y + NODE}V${rail}`, down + 8, rail - 22, down + 8, rail - 8);
      this.node(role, x(at), y, w);
    }));
    BETWEEN.forEach((between, at) => {
      const from = x(at) + w, to = x(at + 1), y = top + NODE / 2;
      this.edge(between, columns[at + 1], `M${from} ${y}H${to - 7}`, to - 1, y, "right", (from + to) / 2, y - 7, (from + to) / 2, y + 17, "mid");
    });
    const from = x(3) + w / 2, to = x(1) + w / 2;
    this.weights(`M${from} ${top}V16H${to}V${top - 7}`, to, top - 1, "down", (from + to) / 2, 11, "mid");
    const n = Math.max(4, others.length), ow = (width - 12 * (n - 1) - 2) / n;
    others.forEach((role, at) => {
      const left = 1 + at * (ow + 12), y = rail + 34;
      this.drop(role, `M${left + 14} ${y}V${rail}`, left + 22, y - 19, left + 22, y - 6);
      this.node(role, left, y, ow);
    });
    return rail + (others.length ? 36 + NODE : 24);
  }

  tall(columns, others, width) {
    const w = width - 128, left = 18, rail = width - 8, ys = [];
    let y = 20;
    const place = (role) => {
      this.drop(role, `M${left + w} ${y + NODE / 2}H${rail}`, rail - 7, y + NODE / 2 - 6, rail - 7, y + NODE / 2 + 15, "end");
      this.node(role, left, y, w);
      y += NODE + 10;
    };
    columns.forEach((roles, at) => {
      if (at) {
        this.edge(BETWEEN[at - 1], roles, `M${left + 30} ${y - 10}V${y + 27}`, left + 30, y + 33, "down", left + 42, y + 16, left + 110, y + 16);
        y += 34;
      }
      ys.push(y);
      roles.forEach(place);
    });
    const last = ys[3] + NODE / 2, first = ys[1] + NODE / 2;
    this.weights(`M${left} ${last}H7V${first}H${left - 7}`, left - 1, first, "right", left + 12, y + 6);
    y += 24;
    others.forEach(place);
    this.rail(`M${rail} 18V${y - 8}`, rail, 11, "end");
    return y;
  }

  // -- parts -----
  text(parent, x, y, kind = "") { const made = svg("text", { x, y, class: kind }); parent.append(made); return made; }
  head(x, y, way) { return svg("path", { class: "head", d: way === "right" ? `M${x} ${y}l-8 -4.5v9z` : `M${x} ${y}l-4.5 -8h9z` }); }
  group() { const made = svg("g"); this.root.append(made); return made; }
  rail(d, x, y, kind) { const g = this.group(); g.append(svg("path", { class: "rail", d })); this.busText = this.text(g, x, y, `dim ${kind}`); }
  drop(role, d, x, y, x2, y2, kind = "") {
    const g = this.group(), title = svg("title");
    g.append(svg("path", { d }), title);
    this.nodes[role] = { drop: g, dropTitle: title, per: this.text(g, x, y, kind), bytes: this.text(g, x2, y2, `dim ${kind}`) };
  }
  node(role, x, y, w) {
    const g = this.group(), node = this.nodes[role], title = svg("title");
    g.append(svg("rect", { class: "box", x, y, width: w, height: NODE, rx: 3 }), title);
    Object.assign(node, { g, title, name: this.text(g, x + 10, y + 18, "name"), version: this.text(g, x + w - 10, y + 18, "dim end"), does: this.text(g, x + 10, y + 36, "dim"), cells: svg("g"), x, y, w, chars: Math.floor((w - 20) / 6.4) });
    g.append(node.cells);
  }
  edge([state, moved], takers, d, hx, hy, way, x, y, x2, y2, kind = "") {
    const g = this.group(); g.append(svg("path", { d }), this.head(hx, hy, way));
    this.edges.push({ g, state, moved, takers, rate: this.text(g, x, y, `big ${kind}`), held: this.text(g, x2, y2, `dim ${kind}`) });
  }
  weights(d, hx, hy, way, x, y, kind = "") {
    const g = this.group(); g.append(svg("path", { d }), this.head(hx, hy, way));
    this.published = { g, said: this.text(g, x, y, `dim ${kind}`) };
  }

  // -- what they say -----
  fill(node, role, rows, p) {
    const blocked = p.web.blocked, bad = rows.filter((row) => blocked[row.name]), sent = rows.map((row) => p.web.senders[row.name.replaceAll("/", "-")] || [0, 0]);
    const sum = (at) => sent.reduce((all, one) => all + one[at], 0), why = bad.map((row) => `${row.name}: ${blocked[row.name]}`);
    if (blocked[role] && !bad.length) why.push(blocked[role]);
    node.g.setAttribute("class", why.length ? "blocked" : "");
    node.name.textContent = rows.length > 1 ? `${role} ×${rows.length}` : role;
    const versions = rows.map((row) => row.version).filter(Boolean), behind = Math.max(0, ...rows.map((row) => row.behind));
    node.version.textContent = versions.length ? `v${Math.max(...versions)}${behind ? ` −${behind}` : ""}` : "";
    const busy = rows.map((row) => row.busy).filter(known), mean = busy.length ? busy.reduce((a, b) => a + b, 0) / busy.length : null;
    const doing = rows.length === 1 ? rows[0].doing : [...new Set(rows.map((row) => row.doing))].join(", ");
    const does = rows.length ? `${mean === null ? "" : percent(mean) + " busy · "}${doing}` : "not there";
    node.does.textContent = does.length > node.chars ? does.slice(0, node.chars - 1) + "…" : does;
    node.title.textContent = [`${role}: ${does}`, ...why].join("\n");
    const most = Math.floor((node.w - 20) / 12), shown = rows.slice(0, most), wide = shown.length === 1 ? node.w - 20 : 10;
    node.cells.replaceChildren(...shown.flatMap((row, k) => [
      svg("rect", { class: "cell", x: node.x + 10 + 12 * k, y: node.y + 45, width: wide, height: 7, opacity: 0.15 }),
      svg("rect", { class: blocked[row.name] ? "cell bad" : "cell", x: node.x + 10 + 12 * k, y: node.y + 45, width: wide * (blocked[row.name] ? 1 : row.busy || 0), height: 7 }),
    ]));
    node.drop.setAttribute("class", sum(0) > 0.05 ? "moving" : "");
    node.per.textContent = sum(0) ? `${short(sum(0))} msg/s` : "";
    node.bytes.textContent = sum(0) ? `${short(sum(1))}B/s` : "";
    node.dropTitle.textContent = `${role} on the bus`;
  }

  flows(p) {
    const slots = p.slots || {}, stuck = (role) => p.web.blocked[role] || p.web.rows.some((row) => row.role === role && p.web.blocked[row.name]) && p.web.rows.every((row) => row.role !== role || p.web.blocked[row.name]);
    for (const edge of this.edges) {
      const rate = p.web.moved[edge.moved], held = slots[edge.state] || 0;
      edge.g.setAttribute("class", edge.takers.some(stuck) ? "blocked" : rate > 0.05 ? "moving" : "");
      edge.rate.textContent = known(rate) ? `${short(rate)}/s` : "";
      edge.held.textContent = p.web.ring ? `${short(held)} ${edge.state}` : "";
    }
    const per = p.steps_per_min;
    this.published.g.setAttribute("class", per > 0 && !p.web.over ? "moving" : "");
    this.published.said.textContent = p.version ? `weights: version ${p.version}${known(per) && !p.web.over ? ` · ${short(per)} steps/min` : ""}` : "weights";
    const total = Object.values(p.web.senders).reduce((all, one) => [all[0] + one[0], all[1] + one[1]], [0, 0]);
    this.busText.textContent = `bus · ${short(total[0])} msg/s · ${short(total[1])}B/s`;
  }
}

// -- curves over steps or time ---------------------------------------------------------------------------------------

// A curve is a column of the steps and its label. `rounds`: those of validation, by set; `parts`: a curve for each part of
// the reward; `moves`: shown only where it is not the same all the time.
const PLOTS = [
  { name: "validation, mean reward", rounds: true },
  { name: "reward", of: [["reward", "all"], ["reward_trained", "trained"]] },
  { name: "parts of the reward", parts: true },
  { name: "length, tokens", of: [["length", ""]] },
  { name: "tokens trained per second", of: [["tokens_per_s", ""]] },
  { name: "learning rate", of: [["lr", ""]] },
  { name: "gradient norm before clipping", of: [["grad_norm", ""]] },
  { name: "flat groups and cut answers, share", of: [["flat_share", "flat"], ["cut_share", "cut"]] },
  { name: "KL, nats per token", of: [["kl", "to the reference"], ["k3", "sampled to trained (k3)"]] },
  { name: "entropy, nats per token", of: [["entropy", ""]] },
  { name: "effective sample size, share", of: [["ess", ""]] },
  { name: "age, steps", of: [["age_mean", "mean"], ["age_max", "oldest"]] },
  { name: "log-prob. difference engine/trainer", of: [["mismatch", ""]] },
  { name: "threshold n_min, groups", of: [["n_min", "in force"], ["control_n_min", "controller"]], moves: true },
];
const MOST_STEPS = 4096, DAY_S = 86400;

function smoothed(values, window) {
  const recent = [];
  let sum = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    recent.push(value); sum += value;
    if (recent.length > window) sum -= recent.shift();
    return sum / recent.length;
  });
}
const figure = (value) => !known(value) ? "-" : Math.abs(value) >= 1e5 ? short(value) : String(+value.toPrecision(value && Math.abs(value) < 1e-3 ? 3 : 4));

class Charts {
  constructor(root, choices) {
    Object.assign(this, { root, rows: new Map(), rounds: [], plots: [], over: "step", window: 1, log: false });
    choices.addEventListener("change", () => {
      const chosen = new FormData(choices);
      this.over = chosen.get("over"); this.window = +chosen.get("window"); this.log = chosen.has("log");
      this.build();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    new ResizeObserver(() => this.resize()).observe(root);
  }
  clear() { this.rows.clear(); }
  add({ columns, rows, rounds }) {
    for (const row of rows) this.rows.set(row[0], Object.fromEntries(columns.map((name, at) => [name, row[at]])));
    while (this.rows.size > MOST_STEPS) this.rows.delete(this.rows.keys().next().value);
    this.rounds = rounds.map(([set, step, mean, time]) => ({ set, step, mean, time }));
    this.show();
  }
  show() {
    const drawn = PLOTS.map((spec) => this.lines(spec)), shape = JSON.stringify(drawn.map(({ labels }) => labels));
    if (shape !== this.shape || !this.plots.length) { this.shape = shape; this.build(); return; }
    this.plots.forEach((one, at) => { one.plot.setData(drawn[at].data); this.say(one); });
    this.hide();
  }

  // -- what is drawn -----
  lines(spec) {
    const sorted = (rows) => rows.filter((row) => known(row[this.over])).sort((a, b) => a[this.over] - b[this.over]);
    const rows = sorted(spec.rounds ? this.rounds : [...this.rows.values()]);
    const told = ([, all]) => all.some((value) => known(value) && (value || !spec.moves)); // a controller that is off says 0
    const curves = spec.rounds ? this.bySet(rows) : spec.parts ? this.byPart(rows) : spec.of.map(([name, label]) => [label, rows.map((row) => row[name])]).filter(told);
    const values = curves.map(([, all]) => all.map((value) => known(value) && !(this.log && value <= 0) ? value : null));
    const raw = this.window > 1 ? values : [], shown = this.window > 1 ? values.map((all) => smoothed(all, this.window)) : values;
    return { labels: curves.map(([label]) => label), data: [rows.map((row) => row[this.over]), ...shown, ...raw] };
  }
  bySet(rows) {
    const sets = [...new Set(rows.map((row) => row.set))];
    return sets.map((set) => [set || (sets.length > 1 ? "validation" : ""), rows.map((row) => row.set === set ? row.mean : null)]);
  }
  byPart(rows) {
    const names = [...new Set(rows.flatMap((row) => Object.keys(row).filter((name) => name.startsWith("part/"))))];
    return names.map((name) => [name.slice(5), rows.map((row) => row[name])]);
  }
  hide() {
    let changed = false;
    for (const { spec, place, plot, labels } of this.plots) {
      const [first, ...curves] = plot.data, values = (curves[0] || []).filter(known);
      const still = spec.moves && labels.length < 2 && values.every((value) => value === values[0]);
      const empty = !first.length || !curves.some((all) => all.some(known)) || still;
      changed = changed || place.hidden !== empty;
      place.hidden = empty;
    }
    $("no-step").hidden = this.plots.some(({ place }) => !place.hidden);
    if (changed) this.resize();
  }
  resize() { for (const { plot, place } of this.plots) if (!place.hidden && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: 120 }); }

  // -- how it is drawn -----
  build() {
    this.plots.forEach(({ plot }) => plot.destroy());
    this.plots = PLOTS.map((spec) => this.plot(spec, this.lines(spec)));
    this.root.replaceChildren(...this.plots.map(({ place }) => place));
    this.hide();
    this.resize();
    this.plots.forEach((one) => this.say(one));
  }
  plot(spec, { labels, data }) {
    const said = el("span"), place = el("div", { class: "plot", tabindex: "0", role: "img" }, el("h3", {}, spec.name, said));
    const one = { spec, place, said, labels, cursor: null };
    const points = { show: Boolean(spec.rounds), size: 5 }, curve = (faint) => (_, at) => ({ stroke: this.tone(at), width: faint ? 1 : 1.5, alpha: faint ? 0.3 : 1, points: faint ? { show: false } : points, spanGaps: true });
    const series = [{}, ...labels.map(curve(false)), ...(this.window > 1 ? labels.map(curve(true)) : [])];
    const axis = { stroke: color("--dim"), grid: { stroke: color("--faint"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    one.plot = new uPlot({
      width: 300, height: 120, series, legend: { show: false }, scales: { x: { time: false }, y: { distr: this.log ? 3 : 1 } }, padding: [8, 14, 0, 0],
      cursor: { sync: { key: "curves", scales: ["x", null] }, drag: { x: true, y: false } },
      axes: [{ ...axis, size: 22, space: 60, values: (_, all) => all.map((x) => this.across(x, all)) }, { ...axis, size: 48, space: 28, values: (_, all) => all.map((y) => y === null ? "" : figure(y)) }],
      hooks: { setCursor: [(plot) => { one.cursor = plot.cursor.idx; this.say(one); }] },
    }, data, place);
    place.addEventListener("keydown", (event) => this.key(event, one));
    return one;
  }
  tone(at) { return color(`--curve-${at % 6}`); }
  across(x, all) {
    if (this.over === "step") return Number.isInteger(x) ? x : "";
    const day = new Date(x * 1000), long = all.length > 1 && all.at(-1) - all[0] > DAY_S;
    return long ? `${day.getMonth() + 1}-${day.getDate()} ${String(day.getHours()).padStart(2, "0")}h` : day.toTimeString().slice(0, all.length > 1 && all[1] - all[0] < 60 ? 8 : 5);
  }
  say(one) {
    const [xs, ...curves] = one.plot.data, at = one.cursor ?? xs.length - 1;
    const at_hand = (all) => one.cursor === null ? all.findLast(known) : all[at];
    const words = one.labels.map((label, n) => [label, figure(at_hand(curves[n]))]);
    one.said.replaceChildren(...words.map(([label, value], n) => {
      const key = el("span", { class: label ? "key" : false }, label ? `${label} ${value}` : value);
      key.style.setProperty("--tone", this.tone(n));
      return key;
    }));
    const where = !xs.length ? "no step yet" : this.over === "step" ? `step ${xs[at]}` : new Date(xs[at] * 1000).toLocaleString();
    one.place.setAttribute("aria-label", `${one.spec.name}, ${where}: ${words.map((pair) => pair.join(" ").trim()).join(", ")}`);
    if (!one.spec.rounds && xs.length) $("at").textContent = where;
  }
  key(event, one) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key], [xs] = one.plot.data;
    if (!way || !xs.length) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(xs.length - 1, (one.cursor ?? xs.length - 1) + way * (event.shiftKey ? 10 : 1)));
    one.plot.setCursor({ left: one.plot.valToPos(xs[at], "x"), top: 10 });
  }
}

// -- the last minutes ----------------------------------------------------------------------------------------------

class Timeline {
  constructor(names, canvas, said) {
    Object.assign(this, { names, canvas, said, lines: [], kept: 300, ago: null, line: 0 });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { this.ago = null; this.draw(); });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentNode);
  }
  show(lines, kept) {
    const oldest = Math.max(0, ...lines.map(({ spans }) => spans[0][0]));
    this.lines = lines; this.kept = Math.min(kept, Math.max(60, 60 * Math.ceil(oldest / 60)));
    this.names.replaceChildren(...lines.map((line) => el("div", {}, line.process)));
    this.draw();
  }
  draw() {
    const { canvas, lines, kept } = this, width = canvas.clientWidth, height = lines.length * 20 + 18, scale = devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), x = (ago) => width * (1 - ago / kept), tone = Object.fromEntries(["accent", "soft", "faint", "red", "dim", "line", "text"].map((name) => [name, color(`--${name}`)]));
    pen.scale(scale, scale); pen.font = "11px system-ui"; pen.textBaseline = "middle";
    lines.forEach(({ spans }, at) => {
      for (const [begin, end, doing, busy, bad] of spans) {
        const named = !["idle", "working", "ready", "on the bus"].includes(doing), left = x(Math.min(kept, begin)), wide = Math.max(1, x(end) - left), y = at * 20;
        pen.fillStyle = bad ? tone.red : tone.faint; pen.fillRect(left, y + 3, wide, 14);
        if (!bad && busy) { pen.globalAlpha = busy / 4; pen.fillStyle = tone.accent; pen.fillRect(left, y + 3, wide, 14); pen.globalAlpha = 1; }
        if (!bad && named) { pen.fillStyle = busy ? tone.faint : tone.soft; if (!busy) pen.fillRect(left, y + 3, wide, 14); pen.fillStyle = tone.accent; pen.fillRect(left, y + 3, wide, 3); }
        if ((named || bad) && wide > pen.measureText(doing).width + 8 && !(busy > 2)) { pen.fillStyle = bad ? tone.ground : tone.text; pen.fillText(doing, left + 4, y + 11); }
      }
    });
    pen.fillStyle = tone.dim; pen.strokeStyle = tone.line;
    for (let ago = 0; ago <= kept; ago += 60) {
      pen.textAlign = ago === 0 ? "end" : ago === kept ? "start" : "center";
      pen.fillText(ago ? `−${ago / 60} min` : "now", x(ago), height - 7);
      pen.beginPath(); pen.moveTo(x(ago), 0); pen.lineTo(x(ago), height - 16); pen.stroke();
    }
    pen.textAlign = "start";
    if (this.ago !== null) { pen.strokeStyle = tone.text; pen.beginPath(); pen.moveTo(x(this.ago), 0); pen.lineTo(x(this.ago), height - 16); pen.stroke(); }
    this.say();
  }
  say() {
    const line = this.lines[this.line];
    if (this.ago === null || !line) { this.said.textContent = this.lines.length ? "" : "nothing was watched yet"; return; }
    const found = line.spans.find(([begin, end]) => begin >= this.ago && this.ago >= end);
    this.said.textContent = `${line.process}, ${passed(this.ago)} ago: ${found ? found[2] + (found[3] === null ? "" : `, about ${found[3] * 25}% busy`) : "not known"}`;
  }
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.ago = Math.max(0, this.kept * (1 - (event.clientX - box.left) / box.width));
    this.line = Math.max(0, Math.min(this.lines.length - 1, Math.floor((event.clientY - box.top) / 20)));
    this.draw();
  }
  key(event) {
    const across = { ArrowLeft: 1, ArrowRight: -1 }[event.key] || 0, down = { ArrowUp: -1, ArrowDown: 1 }[event.key] || 0;
    if (!across && !down) return;
    event.preventDefault();
    this.ago = Math.max(0, Math.min(this.kept, (this.ago ?? 0) + across * (event.shiftKey ? 10 : 1)));
    this.line = Math.max(0, Math.min(this.lines.length - 1, this.line + down));
    this.draw();
  }
}
