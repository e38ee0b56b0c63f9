// Lines, areas and bars as SVG. A chart is a focusable box: arrow keys read its points out, + and - zoom, Escape
// shows all again; a pointer reads by hovering and zooms by dragging. What it shows stands in a table behind it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
// What a reader did to a chart, by the chart's id: a live page builds itself anew and must not take it back.
const kept = new Map();
let redraws = [];

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function short(value) {
  if (!isNumber(value)) return "-";
  const size = Math.abs(value);
  for (const [unit, mark] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return `${trim(value / (unit === 1e4 ? 1e3 : unit))} ${mark}`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : trim(value);
}
const trim = (value) => String(Number(value.toPrecision(4)));

// Numbers a person would choose, about `count` of them within a range.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function swatch(name, paint) {
  return el("span", {}, el("span", { class: "mark", style: `background:${paint}`, "aria-hidden": "true" }), name);
}

function dataTable(head, rows) {
  const cell = (value, tag) => el(tag, { class: typeof value === "number" ? "number" : null }, value === null || value === undefined ? "" : typeof value === "number" ? short(value) : String(value));
  const numeric = (index) => rows.some((row) => typeof row[index] === "number");
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((name, index) => el("th", { scope: "col", class: numeric(index) ? "number" : null }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => cell(value, "td")))))));
}

function behind(id, head, rows, label = "as a table") {
  const open = kept.get(`open ${id}`);
  const box = el("details", { id: `table-${id}`, open }, el("summary", {}, label));
  const fill = () => { if (box.open && !box.dataset.full) { box.dataset.full = "1"; box.append(dataTable(head, rows())); } };
  box.addEventListener("toggle", () => { kept.set(`open ${id}`, box.open); fill(); });
  if (open) fill();
  return box;
}

// Calls `draw(width)` now and whenever the box gets another width.
function drawn(box, draw) {
  let width = 0;
  const again = () => { const now = Math.floor(box.clientWidth); if (now > 0) { width = now; draw(width); } };
  new ResizeObserver(() => { if (Math.floor(box.clientWidth) !== width) again(); }).observe(box);
  redraws.push(again);
  requestAnimationFrame(again);
}

// series: [{name, x, y, low?, high?, paint, dash?}]; with `stacked` they are areas on top of each other.
function lineChart({ id, label, unit = "", series, stacked = false, marks = [], level = null, zero = false, height = 230 }) {
  series = series.filter((one) => one.y && one.y.some(isNumber));
  if (!series.length) return el("p", { class: "empty" }, `${label}: nothing was measured`);
  const room = { left: 52, right: 12, top: 8, bottom: 24 };
  const all = series.flatMap((one) => one.x);
  const whole = [Math.min(...all), Math.max(...all)];
  if (whole[0] === whole[1]) { whole[0] -= 0.5; whole[1] += 0.5; }
  let range = kept.get(`range ${id}`) || whole;
  if (range[0] >= whole[1]) range = whole;
  let cursor = null, drag = null, place = null;
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const box = el("div", { class: "chart", id, tabindex: "0", role: "application",
    "aria-label": `${label}, chart over steps. Arrow keys read points, plus and minus zoom, Escape shows all.` });
  const tops = stacked ? stack(series) : null;

  function bounds() {
    let low = Infinity, high = -Infinity;
    series.forEach((one, number) => one.x.forEach((x, index) => {
      if (x < range[0] || x > range[1]) return;
      const values = stacked ? [0, tops[number][index]] : [one.y[index], one.low?.[index], one.high?.[index]];
      for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }));
    if (level !== null && isNumber(level.value)) { low = Math.min(low, level.value); high = Math.max(high, level.value); }
    if (low === Infinity) return [0, 1];
    if (zero || stacked) low = Math.min(low, 0);
    const space = (high - low || Math.abs(high) || 1) * 0.05;
    return [zero || stacked ? low : low - space, high + space];
  }

  function draw(width) {
    const [low, high] = bounds();
    const x = (value) => room.left + (value - range[0]) / (range[1] - range[0]) * (width - room.left - room.right);
    const y = (value) => height - room.bottom - (value - low) / (high - low) * (height - room.top - room.bottom);
    place = { x, y, width };
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary() });
    const clip = `clip-${id}`;
    const inner = shape("clipPath", { id: clip });
    inner.append(shape("rect", { x: room.left, y: 0, width: Math.max(width - room.left - room.right, 0), height }));
    svg.append(inner);
    for (const value of ticks(low, high, 5)) {
      svg.append(shape("line", { x1: room.left, x2: width - room.right, y1: y(value), y2: y(value), stroke: colour("grid") }));
      svg.append(shape("text", { x: room.left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    for (const value of ticks(range[0], range[1], Math.max(width / 100, 3.5)))
      svg.append(shape("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, short(value)));
    const plot = shape("g", { "clip-path": `url(#${clip})` });
    svg.append(plot);
    for (const at of marks) plot.append(shape("line", { x1: x(at), x2: x(at), y1: room.top, y2: height - room.bottom, stroke: colour("straggle"), "stroke-dasharray": "2 4" }));
    if (level !== null && isNumber(level.value)) {
      plot.append(shape("line", { x1: room.left, x2: width - room.right, y1: y(level.value), y2: y(level.value), stroke: colour("soft"), "stroke-dasharray": "5 4" }));
      plot.append(shape("text", { x: width - room.right - 4, y: y(level.value) - 5, "text-anchor": "end" }, level.name));
    }
    series.forEach((one, number) => stacked ? area(plot, one, number, x, y) : line(plot, one, x, y));
    const pointer = shape("g", { class: "pointer" });
    svg.append(pointer);
    box.replaceChildren(svg);
    show();
  }

  function line(plot, one, x, y) {
    if (one.low) {
      const there = one.x.map((_, index) => index).filter((index) => isNumber(one.low[index]) && isNumber(one.high[index]));
      const up = there.map((index) => `${x(one.x[index]).toFixed(1)},${y(one.high[index]).toFixed(1)}`);
      const down = there.map((index) => `${x(one.x[index]).toFixed(1)},${y(one.low[index]).toFixed(1)}`).reverse();
      plot.append(shape("polygon", { points: [...up, ...down].join(" "), fill: one.paint, opacity: 0.16 }));
    }
    const pieces = [];
    let open = false;
    one.x.forEach((at, index) => {
      if (!isNumber(one.y[index])) { if (!one.joined) open = false; return; }
      pieces.push(`${open ? "L" : "M"}${x(at).toFixed(1)} ${y(one.y[index]).toFixed(1)}`);
      open = true;
    });
    plot.append(shape("path", { d: pieces.join(""), fill: "none", stroke: one.paint, "stroke-width": 1.7, "stroke-linejoin": "round", "stroke-dasharray": one.dash || "none" }));
    if (one.dots || one.x.length === 1) one.x.forEach((at, index) => { if (isNumber(one.y[index])) plot.append(shape("circle", { cx: x(at), cy: y(one.y[index]), r: 3, fill: one.paint })); });
  }

  function area(plot, one, number, x, y) {
    const under = number ? tops[number - 1] : one.x.map(() => 0);
    const up = one.x.map((at, index) => `${x(at).toFixed(1)},${y(tops[number][index]).toFixed(1)}`);
    const down = one.x.map((at, index) => `${x(at).toFixed(1)},${y(under[index]).toFixed(1)}`).reverse();
    plot.append(shape("polygon", { points: [...up, ...down].join(" "), fill: one.paint, opacity: 0.85 }));
  }

  function nearest(at) {
    const steps = series[0].x;
    let best = 0;
    steps.forEach((step, index) => { if (Math.abs(step - at) < Math.abs(steps[best] - at)) best = index; });
    return steps[best];
  }

  function at(one, step) {
    let best = -1;
    one.x.forEach((x, index) => { if (isNumber(one.y[index]) && (best < 0 || Math.abs(x - step) < Math.abs(one.x[best] - step))) best = index; });
    return best;
  }

  function show() {
    const svg = box.firstChild;
    if (!svg || !place) return;
    const pointer = svg.querySelector(".pointer");
    pointer.replaceChildren();
    if (drag && drag.to !== null) {
      const [a, b] = [drag.from, drag.to].sort((p, q) => p - q);
      pointer.append(shape("rect", { x: a, y: room.top, width: b - a, height: height - room.top - room.bottom, fill: colour("focus"), opacity: 0.15 }));
    }
    if (cursor === null) { readout.textContent = ""; return; }
    pointer.append(shape("line", { x1: place.x(cursor), x2: place.x(cursor), y1: room.top, y2: height - room.bottom, stroke: colour("soft"), opacity: 0.6 }));
    const told = series.map((one, number) => {
      const index = at(one, cursor);
      if (index < 0) return null;
      const top = stacked ? tops[number][index] : one.y[index];
      pointer.append(shape("circle", { cx: place.x(one.x[index]), cy: place.y(top), r: 3.5, fill: one.paint, stroke: colour("card") }));
      return `${one.name} ${short(one.y[index])}${unit}`;
    }).filter(Boolean);
    readout.textContent = `step ${cursor}: ${told.join(", ")}`;
  }

  function summary() {
    return `${label}: ` + series.map((one) => {
      const there = one.y.filter(isNumber);
      return `${one.name} from ${short(there[0])} to ${short(there[there.length - 1])}${unit}`;
    }).join("; ");
  }

  function zoom(low, high) {
    const least = (whole[1] - whole[0]) / Math.max(series[0].x.length, 10);
    range = high - low < least ? range : [Math.max(low, whole[0]), Math.min(high, whole[1])];
    kept.set(`range ${id}`, range[0] === whole[0] && range[1] === whole[1] ? undefined : range);
    draw(place.width);
  }

  const stepAt = (event) => {
    const where = clamp(event.clientX - box.getBoundingClientRect().left, room.left, place.width - room.right);
    return [where, range[0] + (where - room.left) / (place.width - room.left - room.right) * (range[1] - range[0])];
  };
  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [from, step] = stepAt(event);
    drag = { from, step, to: null };
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    const [where, step] = stepAt(event);
    if (drag && Math.abs(where - drag.from) > 4) drag.to = where;
    cursor = nearest(step);
    show();
  });
  box.addEventListener("pointerup", (event) => {
    const dragged = drag, [where, step] = stepAt(event);
    drag = null;
    if (dragged && Math.abs(where - dragged.from) > 4) zoom(...[dragged.step, step].sort((a, b) => a - b));
    else show();
  });
  box.addEventListener("pointercancel", () => { drag = null; show(); });
  box.addEventListener("pointerleave", () => { if (!drag) { cursor = null; show(); } });
  box.addEventListener("dblclick", () => zoom(...whole));
  box.addEventListener("keydown", (event) => {
    const steps = series[0].x.filter((step) => step >= range[0] && step <= range[1]);
    const now = cursor === null ? -1 : steps.indexOf(nearest(cursor));
    const jump = event.shiftKey ? Math.max(Math.floor(steps.length / 10), 1) : 1;
    const middle = cursor === null ? (range[0] + range[1]) / 2 : cursor, half = (range[1] - range[0]) / 2;
    const does = {
      ArrowRight: () => { cursor = steps[clamp(now + jump, 0, steps.length - 1)]; show(); },
      ArrowLeft: () => { cursor = steps[clamp(now < 0 ? steps.length - 1 : now - jump, 0, steps.length - 1)]; show(); },
      Home: () => { cursor = steps[0]; show(); },
      End: () => { cursor = steps[steps.length - 1]; show(); },
      "+": () => zoom(middle - half / 2, middle + half / 2),
      "-": () => zoom(middle - half * 2, middle + half * 2),
      Escape: () => { cursor = null; zoom(...whole); },
    }[event.key === "=" ? "+" : event.key];
    if (does) { does(); event.preventDefault(); }
  });
  drawn(box, draw);
  const legend = el("div", { class: "legend" }, series.map((one) => swatch(one.name, one.paint)));
  const table = () => series[0].x.map((step) => [step, ...series.map((one) => { const index = one.x.indexOf(step); return index < 0 ? null : one.y[index]; })]);
  return el("figure", {}, legend, box, readout, behind(id, ["step", ...series.map((one) => one.name + (unit ? ` (${unit.trim()})` : ""))], table));
}

function stack(series) {
  const tops = [];
  series.forEach((one, number) => tops.push(one.y.map((value, index) => (isNumber(value) ? value : 0) + (number ? tops[number - 1][index] : 0))));
  return tops;
}

// bars: [{name, parts: [{name, value, paint}]}], each a row.
function barChart({ id, label, unit, bars }) {
  const row = bars.length > 24 ? 12 : 22, left = 74;
  const longest = Math.max(...bars.map((bar) => bar.parts.reduce((sum, one) => sum + (one.value || 0), 0)), 1e-12);
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const box = el("div", { class: "chart", id, tabindex: "0", role: "application", "aria-label": `${label}, bars. Arrow keys up and down read them.` });
  let chosen = -1;
  const tell = (index) => {
    chosen = index;
    const bar = bars[index];
    const total = bar.parts.reduce((sum, one) => sum + (one.value || 0), 0);
    readout.textContent = `${bar.name}: ` + bar.parts.map((one) => `${one.name} ${short(one.value)}${unit} (${Math.round(100 * (one.value || 0) / (total || 1))} %)`).join(", ");
  };
  drawn(box, (width) => {
    const height = bars.length * row + 6;
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    bars.forEach((bar, index) => {
      const group = shape("g", {});
      if (row > 14 || index % 4 === 0) group.append(shape("text", { x: left - 8, y: index * row + row / 2 + 5, "text-anchor": "end" }, bar.name));
      let at = left;
      for (const one of bar.parts) {
        const size = (one.value || 0) / longest * (width - left - 8);
        group.append(shape("rect", { x: at, y: index * row + 3, width: Math.max(size, 0), height: row - 4, fill: one.paint }));
        at += size;
      }
      group.append(shape("rect", { x: 0, y: index * row, width, height: row, fill: "transparent" }));
      group.addEventListener("pointerenter", () => tell(index));
      svg.append(group);
    });
    box.replaceChildren(svg);
  });
  box.addEventListener("keydown", (event) => {
    const to = { ArrowDown: chosen + 1, ArrowUp: chosen < 0 ? bars.length - 1 : chosen - 1, Home: 0, End: bars.length - 1 }[event.key];
    if (to !== undefined) { tell(clamp(to, 0, bars.length - 1)); event.preventDefault(); }
  });
  const parts = bars[0].parts;
  const legend = el("div", { class: "legend" }, parts.map((one) => swatch(one.name, one.paint)));
  return el("figure", {}, legend, box, readout, behind(id, ["", ...parts.map((one) => `${one.name} (${unit.trim()})`)], () => bars.map((bar) => [bar.name, ...bar.parts.map((one) => one.value)])));
}
