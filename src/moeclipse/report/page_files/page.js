// The page: sections from figures. All texts of a run are set as text, never as markup.
"use strict";

const PARTS = ["compute", "exposed", "straggle", "idle"];
const CARDS = { loss: "loss, last tenth", eval_loss: "held-out loss", tokens_per_s: "throughput", step_ms: "a step", hidden: "communication hidden", exposed: "exposed, of a step", straggle: "straggle, of a step", mfu: "share of the peak (MFU)", balance: "balance of ranks, 1 is even", incidents: "incidents" };
const UNITS = { loss: "nats a token", loss_first: "nats a token", loss_last: "nats a token", eval_loss: "nats a token", eval_best: "nats a token", tokens_per_s: "tokens/s" };
const AXES = {
  step: { name: "step", read: (value) => `step ${value}` },
  tokens: { name: "tokens", read: (value) => `${short(value)} tokens` },
  seconds: { name: "seconds of training", read: (value) => `${short(value)} s` },
};
const COLOURS = 8;
const runPaint = (index) => `var(--run-${index % COLOURS})`;
const runDash = (index) => (index < COLOURS ? null : `${2 + 2 * Math.floor(index / COLOURS)} 2`);

let figures = JSON.parse(document.getElementById("figures").textContent);

function section(id, title, wide, ...children) {
  return el("section", { id: `part-${id}`, class: wide ? null : "half", "aria-labelledby": `title-${id}` }, el("h2", { id: `title-${id}` }, title), ...children);
}

const each = (build) => figures.runs.map((run, index) => build(run, index)).filter((one) => one !== null);
const several = () => figures.runs.length > 1;
const named = (run, text) => (several() ? `${run.mark}: ${text}` : text);
// What is shown of one run at a time: with several, of the one that a reader picked.
const picked = () => figures.runs.find((run) => run.mark === kept.get("picked")) || figures.runs[0];
const shown = (build) => [build(picked(), figures.runs.indexOf(picked()))].filter((one) => one !== null);
const hasAxis = (name) => figures.runs.some((run) => Array.isArray(run.curves[name]));
const axisName = () => (hasAxis(kept.get("axis")) ? kept.get("axis") : "step");

function header() {
  const lines = each((run, index) => el("p", { class: "run" }, several() ? el("strong", {}, swatch(`${run.mark}: ${run.name}`, runPaint(index), runDash(index))) : null, several() ? " " : null,
    el("span", { class: "soft" }, `${run.done} of ${run.wanted ?? "?"} steps on ${run.num_ranks} ${run.num_ranks === 1 ? "rank" : "ranks"}, `, el("code", {}, run.directory))));
  const state = figures.live ? el("span", { class: "live", role: "status", id: "live" }, " live") : null;
  const title = !several() ? figures.runs[0].name : figures.runs.length === 2 ? figures.runs.map((run) => run.name).join(" and ") : `${figures.runs.length} runs`;
  document.getElementById("top").replaceChildren(el("h1", {}, title, state), el("div", { class: "runs" }, lines));
}

function choose(id, label, options, value) {
  const select = el("select", { id, onchange: () => { kept.set(id, select.value); refresh(figures); } }, options.map(([name, text]) => el("option", { value: name }, text)));
  select.value = value;
  return el("label", {}, label, " ", select);
}

function controls() {
  const axes = Object.keys(AXES).filter(hasAxis);
  const tools = [choose("axis", "curves over", axes.map((name) => [name, AXES[name].name === "step" ? "steps" : AXES[name].name]), axisName()),
    choose("smooth", "smoothed by", [["0", "nothing"], ["2", "2 % of the run"], ["5", "5 %"], ["10", "10 %"]], kept.get("smooth") || "0")];
  if (several()) tools.push(choose("picked", "details of", each((run) => [run.mark, `${run.mark}: ${run.name}`]), picked().mark));
  document.getElementById("controls").replaceChildren(...tools);
}

function cards() {
  const [first] = figures.runs;
  const found = Object.keys(CARDS).filter((name) => figures.runs.some((run) => run.measures[name] !== null)).map((name) => {
    const unit = UNITS[name] ? el("span", { class: "soft unit" }, ` ${UNITS[name]}`) : null;
    const value = (run) => [run.in_words[name], run.measures[name] === null ? null : unit?.cloneNode(true)];
    const rows = several() ? each((run, index) => el("div", { class: "second" }, swatch(run.mark, runPaint(index), runDash(index)), el("span", { class: "value" }, value(run)), index ? difference(name, first.measures[name], run.measures[name]) : null))
      : [el("div", { class: "value" }, value(first))];
    return el("div", { class: "card", title: figures.about[name] }, el("div", { class: "what" }, CARDS[name]), ...rows);
  });
  const rows = Object.keys(figures.about).map((name) => [figures.about[name], name, ...figures.runs.flatMap((run, index) => [run.in_words[name], ...(index ? [change(first.measures[name], run.measures[name])] : [])])]);
  const head = ["", "name", ...figures.runs.flatMap((run, index) => [named(run, "value"), ...(index ? [`${run.mark} against A`] : [])])];
  const alike = new Map();
  for (const run of figures.runs) if (run.window) alike.set(run.window, [...(alike.get(run.window) || []), run.mark]);
  const windows = [...alike].map(([window, marks]) => `${alike.size > 1 ? `${marks.join(", ")}: ` : ""}times are means of ${window}`).join("; ");
  const rest = several() && unequal() ? " The runs have other lengths: compare losses at equal steps and tokens, below." : "";
  return section("numbers", "In numbers", true, el("div", { class: several() ? "cards wide" : "cards" }, found), el("p", { class: "soft note" }, windows, windows ? "." : "", rest), behind("numbers", head, () => rows, "all numbers"));
}

const unequal = () => Object.values(figures.equal || {}).some((one) => !one.same);

function change(a, b) {
  if (a === null || b === null) return "";
  if (a === 0) return b === 0 ? "the same" : short(b - a);
  const share = 100 * (b - a) / Math.abs(a);
  return Math.abs(share) < 0.05 ? "the same" : `${share > 0 ? "+" : ""}${share.toFixed(1)} %`;
}

function difference(name, a, b) {
  const text = change(a, b);
  if (!text || text === "the same") return el("span", { class: "soft" }, text);
  const far = ["loss", "eval_loss"].includes(name) && unequal();  // other lengths: no verdict
  const better = far ? null : figures.less_is_better.includes(name) ? b < a : figures.more_is_better.includes(name) ? b > a : null;
  return el("span", { class: better === null ? "soft" : better ? "good" : "bad" }, `${text}${better === null ? "" : better ? " better" : " worse"}`);
}

function equalSection() {
  if (!several()) return null;
  const tables = Object.entries(figures.equal).map(([axis, found]) => {
    const loss = found.runs[0].loss, held = found.runs.some((one) => one.eval_loss !== null);
    const other = axis === "step" ? "tokens" : "step";
    const head = ["run", "loss (nats a token)", "against A", ...(held ? ["held-out loss (nats a token)", `taken at ${axis === "step" ? "step" : "tokens"}`] : []), other === "step" ? "steps" : "tokens", "seconds of training"];
    const rows = found.runs.map((one, index) => [`${figures.runs[index].mark}: ${figures.runs[index].name}`, one.loss, index ? change(loss, one.loss) : "", ...(held ? [one.eval_loss, one.eval_at] : []), one[other], one.seconds]);
    return [el("h3", {}, axis === "step" ? `After ${short(found.at)} steps` : `After ${short(found.at)} tokens`), dataTable(head, rows)];
  });
  return section("equal", "At equal steps and tokens", true, ...(tables.length ? tables.flat() : [empty("the runs have no steps in common")]),
    el("p", { class: "soft note" }, "As far as all of them have come. The loss is the mean of the last tenth of the steps until there; seconds are those of steps, without starting, validating or saving."));
}

function advice() {
  const lists = each((run, index) => {
    const items = run.advice.map((one) => el("li", {}, el("code", {}, one.setting),
      one.share === null ? null : el("span", { class: "gain" }, `  wins ${one.at_most ? "at most " : ""}${(100 * one.share).toFixed(0)} % of a step (${short(one.gain_ms)} ms)`), el("div", { class: "soft" }, one.why)));
    const title = several() ? el("h3", {}, swatch(`${run.mark}: ${run.name}`, runPaint(index), runDash(index))) : null;
    return [title, items.length ? el("ul", { class: "advice" }, items) : empty("nothing that the run has measured would win 1 % of a step"), ...run.skew.map((line) => el("p", { class: "soft" }, line))];
  });
  return section("advice", "What would have helped", true, ...lists.flat());
}

function lines(name, label, factor = 1) {
  const scaled = (values) => (values && factor !== 1 ? values.map((one) => (isNumber(one) ? one * factor : one)) : values);
  return each((run, index) => {
    const found = run.curves[name], x = run.curves[axisName()];
    return found && x ? { name: several() ? `${run.mark} ${label}` : label, x, y: scaled(found.mean), low: scaled(found.low), high: scaled(found.high), paint: runPaint(index), dash: runDash(index) } : null;
  });
}

function curveChart(options) {
  return lineChart({ axis: AXES[axisName()], smooth: Number(kept.get("smooth") || 0), ...options });
}

function lossSection() {
  const held = each((run, index) => run.eval.step.length && run.eval[axisName()] ? { name: named(run, "held out"), x: run.eval[axisName()], y: run.eval.loss, paint: several() ? runPaint(index) : "var(--held)", dash: "6 3", dots: true } : null);
  const entropy = figures.runs[0].unigram_entropy;
  const marks = axisName() === "step" && !several() ? figures.runs[0].events.filter((one) => one.step !== null && one.kind !== "note").map((one) => one.step).slice(0, 60) : [];
  return section("loss", "Loss", true, curveChart({ id: "loss", label: "loss", unit: "nats a token", series: [...lines("loss", "training"), ...held], marks, height: 300,
    level: isNumber(entropy) ? { value: entropy, name: "unigram entropy" } : null }));
}

function speedSections() {
  const found = [section("speed", "Throughput", false, curveChart({ id: "speed", label: "throughput", unit: "tokens/s", series: lines("tokens_per_s", "throughput"), zero: true }))];
  if (several()) found.push(section("parts", "Where a step went, on average", false, barChart({ id: "parts", label: "mean step of each run", unit: "ms",
    bars: each((run) => ({ name: run.mark, parts: PARTS.map((part) => ({ name: part, value: run.measures[`${part}_ms`] ?? 0, paint: `var(--${part})` })) })) })));
  found.push(...shown((run) => {
    const x = run.curves[axisName()];
    const series = PARTS.filter((part) => x && run.curves[`${part}_ms`]).map((part) => ({ name: part, x, y: run.curves[`${part}_ms`].mean, paint: `var(--${part})` }));
    return series.length ? section(`parts-${run.mark}`, named(run, "Where a step went"), false, curveChart({ id: `parts-${run.mark}`, label: "milliseconds of a step", unit: "ms", series, stacked: true })) : null;
  }));
  if (figures.runs.some((run) => run.curves.mfu)) found.push(section("mfu", "Share of the device's peak (MFU)", false, curveChart({ id: "mfu", label: "MFU", unit: "%", series: lines("mfu", "MFU", 100), zero: true })));
  found.push(section("norm", "Norm of the gradient", false, curveChart({ id: "norm", label: "norm of the gradient", series: lines("grad_norm", "norm"), zero: true })));
  found.push(section("lr", "Learning rate", false, lineChart({ id: "lr", label: "learning rate", axis: AXES[axisName()], series: lines("lr", "rate"), zero: true })));
  if (figures.runs.some((run) => run.curves.balance)) found.push(section("balance", "Balance of ranks", false, curveChart({ id: "balance", label: "balance", unit: "rows of the mean rank / of the fullest (1: even)", series: lines("balance", "balance") })));
  return found;
}

function rankSections() {
  return shown((run) => section(`ranks-${run.mark}`, named(run, "A step of each rank"), false, run.ranks.length
    ? barChart({ id: `ranks-${run.mark}`, label: "mean step of each rank", unit: "ms", bars: run.ranks.map((parts, rank) => ({ name: `rank ${rank}`, parts: PARTS.map((part) => ({ name: part, value: parts[part] ?? 0, paint: `var(--${part})` })) })) })
    : empty("ranks were not told apart")));
}

function timelineSections() {
  return shown((run) => {
    const found = run.timeline, id = `timeline-${run.mark}`, title = named(run, "A step as it was, and as simulated");
    if (!found || !found.rows.length) return section(id, title, true, empty("no step was traced: moeclipse train --trace 3 records steps 3 to 5 of all ranks"));
    const from = (run.curves.step[0] ?? 1) - 1;
    const told = [`step ${found.steps[0] ?? from}`, found.simulated, found.clock_error_ms ? `clocks of hosts agree within ${trim(found.clock_error_ms)} ms` : "", found.left_out ? `${found.left_out} slices are in trace.json alone` : ""];
    return section(id, title, true, el("p", { class: "soft" }, told.filter(Boolean).join("; "), ". All of it: open trace.json in ui.perfetto.dev."), timelineChart({ id, label: "timeline of a step", figures: found }));
  });
}

function hiddenSections() {
  return shown((run) => run.hidden_by_op.length ? section(`hidden-${run.mark}`, named(run, "What was hidden, by op"), true,
    dataTable(["transfer", "times a step", "exposed (ms)", "hidden (ms)", "waited for others (ms)"], run.hidden_by_op.map((one) => [one.op, one.count, one.exposed_ms, one.hidden_ms, one.late_ms])),
    el("p", { class: "soft" }, "Means over ranks and traced steps. A moment with two transfers under way counts for both.")) : null);
}

function loadSections() {
  return shown((run) => {
    const id = `loads-${run.mark}`, title = named(run, "Loads of experts"), found = run.loads;
    if (!found) return section(id, title, true, empty("loads are not known: there is no load.npz"));
    const all = found.layers.map((_, index) => index), picture = el("div", {});
    const views = [...(found.over_time.length ? all.map((layer) => [`layer-${layer}`, `layer ${found.layers[layer]}, experts over steps`]) : []),
      ["average", "all layers, by expert"], ["source", "all layers, by the rank that rows came from"], ...(run.rows ? [["ranks", "rows of each rank over steps"]] : [])];
    const build = {
      average: () => heatMap({ id: `${id}-heat`, label: "load of each expert by layer", rows: found.experts, columns: found.layers, cells: bytes(found.average), rowName: "expert", columnName: "layer" }),
      source: () => heatMap({ id: `${id}-heat`, label: "load of each expert by source rank", rows: found.experts, columns: Array.from({ length: found.sources }, (_, rank) => rank), cells: bytes(found.by_source), rowName: "expert", columnName: "from rank" }),
      ranks: () => heatMap({ id: `${id}-heat`, label: "rows of each rank over steps", rows: run.rows.count, columns: run.rows.steps, cells: bytes(run.rows.cells), rowName: "rank", columnName: "step" }),
    };
    const layerPicture = (layer) => heatMap({ id: `${id}-heat`, label: `load of each expert of layer ${found.layers[layer]} over steps`, rows: found.experts, columns: found.steps, cells: bytes(found.over_time[layer]), rowName: "expert", columnName: "step" });
    const select = el("select", { id: `${id}-view`, "aria-label": "which loads" }, views.map(([value, text]) => el("option", { value }, text)));
    const known = kept.get(`view ${id}`);
    if (views.some(([value]) => value === known)) select.value = known;
    const show = () => { kept.set(`view ${id}`, select.value); picture.replaceChildren(select.value.startsWith("layer-") ? layerPicture(Number(select.value.slice(6))) : build[select.value]()); };
    select.addEventListener("change", show);
    show();
    return section(id, title, true, el("div", { class: "tools" }, select), picture, heatScale());
  });
}

function eventSections() {
  return shown((run) => {
    const moves = run.placement ? el("p", {}, `Placement: ${run.placement.plans ?? 0} plans taken, ${run.placement.parcels ?? 0} transfers of experts since the run was last started.`) : null;
    const body = run.events.length ? dataTable(["step", "kind", "what"], run.events.map((one) => [one.step === null ? "" : String(one.step), one.kind, one.what])) : empty("nothing happened that had to be told");
    return section(`events-${run.mark}`, named(run, "Moves, notes and incidents"), true, moves, body);
  });
}

function choiceSections() {
  return shown((run) => {
    const rows = run.choices.map((one) => [one.what, one.chosen, one.rule ?? "", one.measured_ms ?? null, one.predicted_ms || null, one.blocking_ms || null]);
    const head = ["what", "chosen", "why", "measured (ms)", "predicted (ms)", "blocking, predicted (ms)"];
    const known = head.map((_, index) => rows.some((row) => row[index] !== null && row[index] !== ""));
    const filled = (row) => row.filter((_, index) => known[index]);
    const body = rows.length ? dataTable(filled(head), rows.map(filled)) : empty("nothing was chosen by the clock");
    return section(`choices-${run.mark}`, named(run, "Choices"), true, body);
  });
}

function memorySections() {
  return shown((run) => {
    const id = `memory-${run.mark}`, title = named(run, "Memory");
    if (!run.memory || !Array.isArray(run.memory.ranks)) return section(id, title, false, empty("memory was not measured"));
    const kinds = run.memory.kinds, paints = ["a", "compute", "straggle", "idle", "kernel", "exposed"];
    return section(id, title, false, barChart({ id, label: "memory by kind", unit: "MiB", bars: run.memory.ranks.map((values, rank) => ({ name: `rank ${rank}`, parts: kinds.map((kind, index) => ({ name: kind === "main_grad" ? "gradients" : kind, value: (values[index] ?? 0) / 2 ** 20, paint: `var(--${paints[index % paints.length]})` })) })) }));
  });
}

function sampleSections() {
  return shown((run) => run.sample && Array.isArray(run.sample.lines) && run.sample.lines.length ? section(`sample-${run.mark}`, named(run, "What it writes"), false,
    ...run.sample.lines.map(([prompt, text]) => el("p", {}, el("code", { class: "soft" }, prompt), el("code", {}, text)))) : null);
}

function settingSection() {
  const differ = figures.settings.filter((row) => row.differs);
  const table = (rows) => {
    const box = dataTable(["key", ...each((run) => named(run, "value"))], rows.map((row) => [row.key, ...row.values]));
    rows.forEach((row, index) => { if (row.differs && rows.length !== differ.length) box.querySelectorAll("tbody tr")[index].className = "differs"; });
    return box;
  };
  const note = several() ? (differ.length ? table(differ) : empty("all of them have the same settings")) : null;
  const open = kept.get("open settings");
  const all = el("details", { id: "table-settings", open }, el("summary", {}, `all ${figures.settings.length} settings`), table(figures.settings));
  all.addEventListener("toggle", () => kept.set("open settings", all.open));
  return section("settings", several() ? "Settings that differ" : "Settings", true, note, figures.settings.length ? all : empty("there is no config.toml"));
}

function gapSection() {
  const found = each((run) => run.gaps.map((gap) => named(run, gap))).flat();
  return found.length ? section("gaps", "Not known", true, el("ul", { class: "gaps" }, found.map((gap) => el("li", {}, gap)))) : null;
}

function build() {
  redraws = [];
  header();
  controls();
  const parts = [cards(), equalSection(), advice(), lossSection(), ...speedSections(), ...rankSections(), ...timelineSections(), ...hiddenSections(), ...loadSections(), ...eventSections(), ...choiceSections(), ...memorySections(), ...sampleSections(), settingSection(), gapSection()].filter(Boolean);
  document.getElementById("main").replaceChildren(...parts);
  document.getElementById("nav").replaceChildren(...parts.map((part) => el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent.replace(/^[A-Z]\d*: /, ""))));
  document.getElementById("foot").textContent = "Written by moeclipse report. Times are means after warm-up, in milliseconds; shares are of a step, and hidden is a share of communication.";
}

// New figures, with what the reader had chosen, opened and focused.
function refresh(found) {
  const focused = document.activeElement?.id, [x, y] = [window.scrollX, window.scrollY];
  figures = found;
  build();
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  window.scrollTo({ left: x, top: y, behavior: "instant" });
}

async function follow() {
  let version = null;
  for (;;) {
    await new Promise((done) => setTimeout(done, 2000));
    const state = document.getElementById("live");
    try {
      const answer = await fetch("figures.json", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
      if (answer.status === 200) { version = answer.headers.get("ETag"); refresh({ ...(await answer.json()), live: true }); }
      else if (state) state.textContent = " live";
    } catch { if (state) state.textContent = " the server has left; this is what it said last"; }
  }
}

build();
document.documentElement.dataset.ready = "1";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((again) => again()));
window.addEventListener("beforeprint", () => redraws.forEach((again) => again()));
if (figures.live) follow();
