"use strict";
// The page: takes pictures, steps and samples from /events and fills the panels. Knows the keys of the JSON, nothing else.

const graph = new Graph($("graph"), $("graph-said")), charts = new Charts($("plots"), $("choices"));
const timeline = new Timeline($("names"), document.querySelector("#lanes canvas"), $("span-said"));
let newest = null, held = false, samples = [], chosen = null;

function table(id, heads, rows, empty) {
  const cell = (tag, value, at) => el(tag, { class: heads[at][1] || false }, value instanceof Node ? value : String(value ?? ""));
  const body = rows.map((row) => el("tr", { class: row.bad ? "red" : false }, ...row.cells.map((value, at) => cell("td", value, at))));
  const none = el("tr", {}, el("td", { class: "l dim", colspan: heads.length }, empty || "none"));
  document.querySelector(`#${id} table`).replaceChildren(
    el("thead", {}, el("tr", {}, ...heads.map(([name, kind]) => el("th", { class: kind || false, scope: "col" }, name)))), el("tbody", {}, ...(rows.length ? body : [none])));
}
function meter(share, title) {
  const full = el("i"), made = el("span", { class: "meter", title: title || false }, full);
  full.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share || 0)))}%`;
  return made;
}

// -- panels ----------------------------------------------------------------------------------------------------------

function show(p) {
  newest = p;
  if (held) return;
  const w = p.web;
  document.title = `${p.name || "run"}${w.model ? ` · ${w.model}` : ""} · step ${p.step} · busrl`;
  $("headline").textContent = w.headline; $("progress").textContent = w.progress; $("speed").textContent = w.over ? w.ended : w.speed;
  const done = p.max_steps ? Math.min(1, p.step / p.max_steps) : 0;
  $("goal").setAttribute("aria-valuenow", Math.round(done * 100)); $("goal").firstChild.style.width = `${done * 100}%`;
  graph.show(p);
  $("blocked").replaceChildren(...Object.entries(w.blocked).map(([name, why]) => el("li", {}, `${name}: ${why}`)), ...(w.damage ? [el("li", {}, w.damage)] : []));
  models(p); processes(p); waits(p); ring(w); versions(p); bus(p); errors(p);
  timeline.show(w.timeline, w.kept_s);
}

// Rows stay while the models do: a link that is replaced loses the focus, and a click that is half done.
let tags = "";
function models(p) {
  const all = Object.entries(p.web.models || {}), present = all.map(([tag]) => tag).join(" ");
  for (const one of document.querySelectorAll(".several")) one.hidden = !all.length;
  if (!all.length) return;
  const wait = (one) => one.waits ? one.waits.for + (known(one.waits.since_s) ? `, ${passed(one.waits.since_s)}` : "") : "";
  const name = (tag) => el("span", {}, el("a", { href: address(tag), "aria-current": tag === p.web.model && "page" }, tag), tag === p.web.lead ? " (lead)" : "");
  const rows = all.map(([tag, one]) => ({
    cells: one.trained ? [name(tag), one.max_steps ? `${one.step}/${one.max_steps}` : one.step, meter(one.max_steps ? one.step / one.max_steps : 0), one.version, number(one.reward.first), number(one.reward.last_10_steps), wait(one), one.processes.join(", ")]
      : [name(tag), "only serves", "", one.version || "", "", "", "", one.processes.join(", ")],
  }));
  const heads = [["model", "l"], ["step"], ["", "grow"], ["version"], ["reward at first"], ["of late"], ["its learner waits for", "l wide"], ["processes", "l"]];
  if (present !== tags) { tags = present; table("models", heads, rows); return; }
  const shown = document.querySelector("#models tbody").rows;
  rows.forEach(({ cells }, row) => cells.forEach((value, column) => column && shown[row].cells[column].replaceChildren(value ?? "")));
}
const address = (tag) => `?model=${encodeURIComponent(tag)}`;
function turn() {
  const all = Object.keys((newest && newest.web.models) || {});
  if (all.length) location.search = address(all[(all.indexOf(newest.web.model) + 1) % all.length]);
}

function processes(p) {
  table("processes", [["process", "l"], ["pid", "minor"], ["doing", "l"], ["busy", "grow"], [""], ["progress"], ["version"], ["samples", "minor"]], p.web.rows.map((row) => ({
    bad: row.late || row.state === "dead",
    cells: [row.name + (row.restarts ? ` ↻${row.restarts}` : ""), row.pid || "", (row.late ? "LATE: " : "") + row.doing, known(row.busy) ? meter(row.busy) : "", percent(row.busy), passed(row.age), row.version ? `${row.version}${row.behind ? ` −${row.behind}` : ""}` : "", row.samples ? short(row.samples) : ""],
  })), p.web.over ? `nothing runs${p.web.ended ? ": " + p.web.ended : ""}` : "none is known yet");
}

function waits(p) {
  const found = p.waits || [];
  table("waits", [["process", "l"], ["for", "l"], ["since"], ["because", "l wide"]], found.map((one) => ({
    bad: p.web.blocked[one.process], cells: [one.process, one.for, passed(one.since_s), one.because],
  })), p.waiting ? `the scheduler: ${p.waiting}` : "nobody says that it waits");
  $("words").replaceChildren(...Object.entries(p.web.words).flatMap(([name, said]) => [el("dt", {}, name), el("dd", {}, said)]));
}

function ring(w) {
  const states = w.ring ? w.ring.states : [], all = w.ring ? w.ring.slots : 1;
  const shade = (at, name) => name === "free" ? "0" : String(0.3 + 0.7 * (at / Math.max(1, states.length - 1)));
  $("occupancy").replaceChildren(...states.map(([name, count], at) => {
    const part = el("i", { title: `${name} ${count}` });
    part.style.flexGrow = count; part.style.opacity = shade(at, name);
    return part;
  }));
  $("occupancy").setAttribute("aria-label", states.map(([name, count]) => `${name} ${count}`).join(", ") || "no ring");
  table("ring", [["state", "l"], ["slots"], ["share", "grow"], ["into it"], ["newest", "minor"], ["median"], ["oldest"]], states.map(([name, count, least, median, most], at) => {
    const bar = meter(count / all), rate = w.moved[name];
    bar.firstChild.style.opacity = name === "free" ? "0.25" : shade(at, name);
    return { cells: [name, short(count), bar, known(rate) ? `${short(rate)}/s` : "-", passed(least), passed(median), passed(most)] };
  }), "no ring");
}

function versions(p) {
  const held = p.web.ring ? p.web.ring.versions : {}, all = Object.values(held).reduce((a, b) => a + b, 0);
  const names = [...new Set([...Object.keys(held), ...p.web.rows.filter((row) => row.version).map((row) => String(row.version))])].sort((a, b) => b - a);
  table("versions", [["version", "l"], ["behind"], ["slots"], ["share", "grow"], ["held by", "l wide"]], names.map((name) => ({
    cells: [`v${name}`, p.version - name || "newest", short(held[name] || 0), meter((held[name] || 0) / (all || 1)), p.web.rows.filter((row) => String(row.version) === name).map((row) => row.name).join(", ")],
  })), p.web.ring ? "no answer is in the ring" : "no ring");
  $("staleness").textContent = p.web.words.staleness || "";
}

function bus(p) {
  const flows = Object.entries((p.messages || {}).by_name || {}).sort((a, b) => b[1].count - a[1].count), most = Math.max(1e-9, ...flows.map(([, one]) => one.per_s));
  table("bus", [["message", "l"], ["per s"], ["", "grow"], ["all"], ["bytes"]], flows.map(([name, one]) => ({ cells: [name.toLowerCase(), one.per_s.toFixed(1), meter(one.per_s / most), short(one.count), short(one.bytes)] })), "nothing was received yet");
  $("bus-said").textContent = p.web.bus;
}

function errors(p) {
  const known_errors = (p.errors || {}).newest || [], before = (error) => error.time && p.started && error.time < p.started;
  const ago = (t) => t ? (p.time - t > 86400 ? new Date(t * 1000).toISOString().slice(0, 16) : `${passed(Math.max(0, p.time - t))} ago`) : "";
  const item = (error) => el("li", { class: error.severity === "warning" || before(error) ? false : "red" }, el("span", { class: "dim" }, `${ago(error.time)} · ${error.severity} · ${error.process} `), error.text);
  const now = known_errors.filter((error) => !before(error)), earlier = known_errors.filter(before);
  $("errors-now").replaceChildren(...(now.length ? now.map(item) : [el("li", { class: "dim" }, earlier.length ? "none since this start" : "none")]));
  $("errors-before").hidden = !earlier.length;
  $("errors-before").firstChild.textContent = `${earlier.length} before this start of the run`;
  $("errors-before").lastChild.replaceChildren(...earlier.map(item));
}

// -- samples ---------------------------------------------------------------------------------------------------------

const plain = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 1);
const number = (value) => known(value) ? String(+value.toFixed(3)) : "-";

function list() {
  $("list").replaceChildren(...samples.map((one) => {
    const button = el("button", { type: "button", "aria-current": one === chosen }, el("span", {}, one.step ?? ""), el("span", {}, number(one.reward)), el("span", {}, plain(one.completion).slice(0, 80)));
    button.addEventListener("click", () => choose(one));
    return el("li", {}, button);
  }));
  if (!samples.length) $("list").replaceChildren(el("li", { class: "dim" }, "no sample is known: samples.jsonl holds some of each step"));
}
function choose(one) { chosen = one; list(); sample(one); }
function step(way) {
  if (!samples.length) return;
  choose(samples[Math.max(0, Math.min(samples.length - 1, samples.indexOf(chosen) + way))]);
  document.querySelector("#list [aria-current]").scrollIntoView({ block: "nearest" });
}

function sample(one) {
  const said = [`step ${one.step}`, `uid ${one.uid}`, `group ${one.group}`, known(one.tokens) ? `${one.tokens} tokens` : "", one.finish === "length" ? "cut at the length limit" : "", `reward ${number(one.reward)}`];
  const parts = Object.entries(one.reward_parts || {}), rest = Object.entries(one.record || {});
  const turns = Array.isArray(one.messages) && one.messages.length ? one.messages.flatMap((turn) => [el("h3", {}, turn.role || "turn"), el("pre", { class: turn.role === "assistant" ? "answer" : false }, plain(turn.content ?? turn))])
    : [el("h3", {}, "prompt"), el("pre", {}, plain(one.prompt ?? "")), el("h3", {}, "completion"), el("pre", { class: "answer" }, plain(one.completion))];
  $("sample").replaceChildren(el("p", {}, said.filter(Boolean).join(" · ")), ...turns,
    ...(rest.length ? [el("h3", {}, "of its line"), el("p", {}, rest.map(([name, value]) => `${name} ${plain(value)}`).join(" · "))] : []),
    ...(parts.length ? [el("h3", {}, "reward parts"), el("p", {}, parts.map(([name, value]) => `${name} ${number(value)}`).join(" · "))] : []),
    ...rewards(one), ...strip(one), ...gaps(one));
}
function rewards(one) {
  const all = one.rewards_of_group || [], low = Math.min(0, ...all), span = Math.max(...all, 0) - low || 1;
  if (!all.length) return [];
  const own = all.indexOf(one.reward), bars = all.map((value, at) => { const bar = el("i", { class: at === own ? "own" : false, title: number(value) }); bar.style.height = `${100 * (value - low) / span}%`; return bar; });
  return [el("h3", {}, `rewards of its group: ${all.map(number).join("  ")}`), el("div", { class: "bars", role: "img", "aria-label": "rewards of its group" }, ...bars)];
}
function strip(one) {
  const runs = one.version_runs || [], kinds = [...new Set(runs.map(([version]) => version))].sort((a, b) => b - a);
  if (!runs.length) return one.versions ? [el("h3", {}, `versions ${one.versions.join(", ")}`)] : [];
  const shade = (version) => String(Math.max(0.15, 1 - 0.35 * kinds.indexOf(version)));
  const made = runs.map(([version, count]) => { const part = el("i", { title: `${count} tokens of version ${version}` }); part.style.flexGrow = count; part.style.opacity = shade(version); return part; });
  const words = runs.map(([version, count]) => `${count} of v${version}`).join(", then ");
  return [el("h3", {}, `tokens by version, the newest strongest: ${words}`), el("div", { class: "strip", role: "img", "aria-label": words }, ...made)];
}

function gaps(one) {
  const gap = one.logprob_gap;
  if (!gap || !Array.isArray(gap.each) || !known(gap.most)) return [];
  const words = `log-probability, learner minus engine: ${gap.mean.toPrecision(2)} on average, at most ${gap.most.toPrecision(2)}, at token ${gap.at + 1}`;
  const made = gap.each.map((value, at) => { const part = el("i", { title: `token ${at + 1}: ${value}` }); part.style.opacity = Math.abs(value) / (gap.most || 1); return part; });
  return [el("h3", {}, words), el("div", { class: "strip gaps", role: "img", "aria-label": words }, ...made)];
}

// -- what comes, and keys ----------------------------------------------------------------------------------------------

const model = new URLSearchParams(location.search).get("model"), source = new EventSource(model ? "events" + address(model) : "events");
const link = (text, bad) => { $("link").textContent = text; $("link").className = bad ? "red" : ""; };
source.addEventListener("open", () => { charts.clear(); samples = []; link(held ? "held" : "live"); });
source.addEventListener("error", () => link(source.readyState === EventSource.CLOSED ? "refused: reload the page" : "connection lost, asking again", true));
source.addEventListener("picture", (event) => show(JSON.parse(event.data)));
source.addEventListener("steps", (event) => charts.add(JSON.parse(event.data)));
source.addEventListener("samples", (event) => {
  const follows = chosen === null || chosen === samples[0];
  samples = [...JSON.parse(event.data).reverse(), ...samples].slice(0, 24);
  if (follows && !held) choose(samples[0]); else list();
});

const PANELS = ["flow", "charts", "samples", "errors", "processes", "waits", "ring", "versions", "timeline", "bus"];
function jump(at) {
  const panel = $(PANELS[at]), folded = panel.querySelector(":scope > details");
  if (folded) folded.open = true;
  panel.focus({ preventScroll: true }); panel.scrollIntoView({ block: "start" });
}
document.querySelector("nav").append(...PANELS.map((id, at) => {
  const name = { waits: "Waits", timeline: "Minutes" }[id] || $(id).querySelector("h2").firstChild.textContent.split(/[ :]/)[0];
  const button = el("button", { type: "button" }, name);
  button.addEventListener("click", () => jump(at));
  return button;
}));
function hold() { held = !held; link(held ? "held: p goes on" : "live"); if (newest) show(newest); }
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || event.target.matches("select, input")) return;
  const digit = "1234567890".indexOf(event.key);
  if (event.key.length === 1 && digit >= 0) jump(digit);
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "p") hold();
  else if (event.key === "m") turn();
  else if (event.key === "?") $("help").showModal();
});
addEventListener("resize", () => newest && graph.show(newest));
charts.show();
list();
