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

const empty = (text) => el("p", { class: "empty" }, text);

function swatch(name, paint, dashed = false) {
  return el("span", {}, el("span", { class: dashed ? "mark dashed" : "mark", style: `--paint:${paint}`, "aria-hidden": "true" }), name);
}

function dataTable(head, rows) {
  const worded = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? short(value) : String(value));
  const right = (value) => typeof value === "number" || /^([+-]?[\d.]+ %|the same)$/.test(value);
  const cell = (value, index) => el("td", { class: right(value) ? "number" : worded(value) === "" ? "none" : null, "data-head": head[index] }, worded(value));
  const numeric = (index) => rows.some((row) => right(row[index]));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((name, index) => el("th", { scope: "col", class: numeric(index) ? "number" : null }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
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

// How far apart the points of a curve are averaged, in the unit of the axis; the raw curve stays, faint.
function smoothed(x, y, width) {
  const found = [];
  let from = 0, to = 0, sum = 0, count = 0;
  for (let index = 0; index < x.length; index++) {
    while (to < x.length && x[to] <= x[index] + width / 2) { if (isNumber(y[to])) { sum += y[to]; count++; } to++; }
    while (x[from] < x[index] - width / 2) { if (isNumber(y[from])) { sum -= y[from]; count--; } from++; }
    found.push(count && isNumber(y[index]) ? sum / count : null);
  }
  return found;
}

// Numbers a person would choose on a logarithmic axis.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const one of high / low > 1e3 ? [1] : high / low > 8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8]) {
      const value = Number((one * 10 ** power).toPrecision(6));
      if (value >= low && value <= high) found.push(value);
    }
  return found.length > 1 ? found : [low, high].map((value) => Number(value.toPrecision(3)));
}

// series: [{name, x, y, low?, high?, paint, dash?}]; with `stacked` they are areas on top of each other.
// axis: {name, read(value)}: what stands below, and how a reader is told a place on it.
function lineChart({ id, label, unit = "", axis = { name: "step", read: (value) => `step ${value}` }, series, stacked = false, marks = [], level = null, zero = false, smooth = 0, height = 230 }) {
  series = series.filter((one) => one.y && one.y.some(isNumber));
  if (!series.length) return empty(`${label}: nothing was measured`);
  if (smooth && !stacked) series = series.map((one) => (one.dots ? one : { ...one, raw: one.y, y: smoothed(one.x, one.y, (smooth * (one.x[one.x.length - 1] - one.x[0])) / 100), low: null, high: null }));
  const room = { left: 52, right: 14, top: 20, bottom: 36 };
  const places = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const whole = [places[0], places[places.length - 1]];
  if (whole[0] === whole[1]) { whole[0] -= 0.5; whole[1] += 0.5; }
  const rangeKey = `range ${id} ${axis.name}`, spaced = unit && unit !== "%" ? ` ${unit}` : unit ? " %" : "";
  const canLog = !stacked && series.every((one) => one.y.every((value) => !isNumber(value) || value > 0));
  let log = canLog && Boolean(kept.get(`log ${id}`));
  let range = kept.get(rangeKey) || whole;
  if (range[0] >= whole[1]) range = whole;
  let cursor = null, drag = null, place = null;
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const box = el("div", { class: "chart", id, tabindex: "0", role: "application",
    "aria-label": `${label}, chart over ${axis.name}. Arrow keys read points, plus and minus zoom, Escape shows all.` });
  const tops = stacked ? stack(series) : null;

  function bounds() {
    let low = Infinity, high = -Infinity;
    series.forEach((one, number) => one.x.forEach((x, index) => {
      if (x < range[0] || x > range[1]) return;
      const values = stacked ? [0, tops[number][index]] : [one.y[index], one.low?.[index], one.high?.[index], one.raw?.[index]];
      for (const value of values) if (isNumber(value) && (!log || value > 0)) { low = Math.min(low, value); high = Math.max(high, value); }
    }));
    if (level !== null && isNumber(level.value)) { low = Math.min(low, level.value); high = Math.max(high, level.value); }
    if (low === Infinity) return [0, 1];
    if (log) return [low / (high / low) ** 0.05, high * (high / low) ** 0.05 * (high === low ? 1.1 : 1)];
    if (zero || stacked) low = Math.min(low, 0);
    const space = (high - low || Math.abs(high) || 1) * 0.05;
    return [zero || stacked ? low : low - space, high + space];
  }

  function draw(width) {
    const [low, high] = bounds(), at = log ? Math.log : (value) => value;
    const x = (value) => room.left + (value - range[0]) / (range[1] - range[0]) * (width - room.left - room.right);
    const y = (value) => height - room.bottom - (at(log ? Math.max(value, low) : value) - at(low)) / (at(high) - at(low)) * (height - room.top - room.bottom);
    place = { x, y, width };
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary() });
    const clip = `clip-${id}`;
    const inner = shape("clipPath", { id: clip });
    inner.append(shape("rect", { x: room.left, y: 0, width: Math.max(width - room.left - room.right, 0), height }));
    svg.append(inner);
    for (const value of log ? logTicks(low, high) : ticks(low, high, 5)) {
      svg.append(shape("line", { x1: room.left, x2: width - room.right, y1: y(value), y2: y(value), stroke: colour("grid") }));
      svg.append(shape("text", { x: room.left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    if (unit || log) svg.append(shape("text", { x: 2, y: 10, class: "unit" }, [unit, log ? "(logarithmic)" : ""].filter(Boolean).join(" ")));
    for (const value of ticks(range[0], range[1], Math.max((width - room.left) / 95, 2))) {
      if (axis.name === "step" && !Number.isInteger(value)) continue;
      const end = x(value) > width - room.right - 16;
      svg.append(shape("text", { x: end ? width - 2 : x(value), y: height - 20, "text-anchor": end ? "end" : "middle" }, short(value)));
    }
    svg.append(shape("text", { x: (room.left + width - room.right) / 2, y: height - 4, "text-anchor": "middle", class: "unit" }, axis.name));
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

  const path = (xs, ys, x, y) => {
    const pieces = [];
    let open = false;
    xs.forEach((at, index) => {
      if (!isNumber(ys[index])) { open = false; return; }
      pieces.push(`${open ? "L" : "M"}${x(at).toFixed(1)} ${y(ys[index]).toFixed(1)}`);
      open = true;
    });
    return pieces.join("");
  };

  function line(plot, one, x, y) {
    if (one.low) {
      const there = one.x.map((_, index) => index).filter((index) => isNumber(one.low[index]) && isNumber(one.high[index]));
      const up = there.map((index) => `${x(one.x[index]).toFixed(1)},${y(one.high[index]).toFixed(1)}`);
      const down = there.map((index) => `${x(one.x[index]).toFixed(1)},${y(one.low[index]).toFixed(1)}`).reverse();
      plot.append(shape("polygon", { points: [...up, ...down].join(" "), fill: one.paint, opacity: 0.16 }));
    }
    const stroke = { fill: "none", stroke: one.paint, "stroke-linejoin": "round" };
    plot.append(shape("path", { d: path(one.x, one.y, x, y), ...stroke, "stroke-width": 1.7, "stroke-dasharray": one.dash || "none" }));
    if (one.raw) plot.append(shape("path", { d: path(one.x, one.raw, x, y), ...stroke, "stroke-width": 1, opacity: 0.28 }));
    if (one.dots || one.x.length === 1) one.x.forEach((at, index) => { if (isNumber(one.y[index])) plot.append(shape("circle", { cx: x(at), cy: y(one.y[index]), r: 2.6, fill: one.paint })); });
  }

  function area(plot, one, number, x, y) {
    const under = number ? tops[number - 1] : one.x.map(() => 0);
    const spread = one.x.length === 1 ? [-24, 24] : [0];  // one step alone is a bar
    const edge = (tall) => one.x.flatMap((at, index) => spread.map((beside) => `${(x(at) + beside).toFixed(1)},${y(tall[index]).toFixed(1)}`));
    const up = edge(tops[number]), down = edge(under).reverse();
    plot.append(shape("polygon", { points: [...up, ...down].join(" "), fill: one.paint, opacity: 0.85 }));
  }

  const nearest = (at) => places.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best), places[0]);

  // The point of a curve beside a place; none where the curve has ended, or not begun.
  function at(one, where) {
    let best = -1;
    one.x.forEach((x, index) => { if (isNumber(one.y[index]) && (best < 0 || Math.abs(x - where) < Math.abs(one.x[best] - where))) best = index; });
    const beside = (whole[1] - whole[0]) / 100;
    return where < one.x[0] - beside || where > one.x[one.x.length - 1] + beside ? -1 : best;
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
      return `${one.name} ${short(one.y[index])}${spaced}`;
    }).filter(Boolean);
    readout.textContent = `${axis.read(cursor)}: ${told.join(", ")}`;
  }

  function summary() {
    return `${label}: ` + series.map((one) => {
      const there = one.y.filter(isNumber);
      return `${one.name} from ${short(there[0])} to ${short(there[there.length - 1])}${spaced}`;
    }).join("; ");
  }

  function zoom(low, high) {
    const least = (whole[1] - whole[0]) / Math.max(places.length, 10);
    range = high - low < least ? range : [Math.max(low, whole[0]), Math.min(high, whole[1])];
    kept.set(rangeKey, range[0] === whole[0] && range[1] === whole[1] ? undefined : range);
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
    const steps = places.filter((step) => step >= range[0] && step <= range[1]);
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
  const scale = canLog ? el("button", { type: "button", class: "log", "aria-pressed": String(log), onclick: () => {
    log = !log;
    kept.set(`log ${id}`, log);
    scale.setAttribute("aria-pressed", String(log));
    draw(place.width);
  } }, "log") : null;
  const legend = el("div", { class: "legend" }, series.map((one) => swatch(one.name, one.paint, one.dash)), scale);
  const table = () => places.map((step) => [step, ...series.map((one) => { const index = one.x.indexOf(step); return index < 0 ? null : one.y[index]; })]);
  return el("figure", {}, legend, box, readout, behind(id, [axis.name, ...series.map((one) => one.name + (unit ? ` (${unit})` : ""))], table));
}

function stack(series) {
  const tops = [];
  series.forEach((one, number) => tops.push(one.y.map((value, index) => (isNumber(value) ? value : 0) + (number ? tops[number - 1][index] : 0))));
  return tops;
}

// bars: [{name, parts: [{name, value, paint}]}], each a row.
function barChart({ id, label, unit, bars }) {
  const row = bars.length > 24 ? 12 : 22, left = clamp(12 + 7 * Math.max(...bars.map((bar) => bar.name.length)), 60, 120);
  const longest = Math.max(...bars.map((bar) => bar.parts.reduce((sum, one) => sum + (one.value || 0), 0)), 1e-12);
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const box = el("div", { class: "chart", id, tabindex: "0", role: "application", "aria-label": `${label}, bars. Arrow keys up and down read them.` });
  let chosen = -1;
  const tell = (index) => {
    chosen = index;
    const bar = bars[index];
    const total = bar.parts.reduce((sum, one) => sum + (one.value || 0), 0);
    readout.textContent = `${bar.name}: ` + bar.parts.map((one) => `${one.name} ${short(one.value)} ${unit} (${Math.round(100 * (one.value || 0) / (total || 1))} %)`).join(", ");
  };
  drawn(box, (width) => {
    const height = bars.length * row + 26;
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
    for (const value of ticks(0, longest, Math.max((width - left) / 90, 2))) {
      const x = left + value / longest * (width - left - 8);
      if (x < width - 4) svg.append(shape("text", { x: clamp(x, left + 12, width - 26), y: height - 5, "text-anchor": "middle" }, value ? `${short(value)} ${unit}` : "0"));
    }
    box.replaceChildren(svg);
  });
  box.addEventListener("keydown", (event) => {
    const to = { ArrowDown: chosen + 1, ArrowUp: chosen < 0 ? bars.length - 1 : chosen - 1, Home: 0, End: bars.length - 1 }[event.key];
    if (to !== undefined) { tell(clamp(to, 0, bars.length - 1)); event.preventDefault(); }
  });
  const parts = bars[0].parts;
  const legend = el("div", { class: "legend" }, parts.map((one) => swatch(one.name, one.paint)));
  return el("figure", {}, legend, box, readout, behind(id, ["", ...parts.map((one) => `${one.name} (${unit})`)], () => bars.map((bar) => [bar.name, ...bar.parts.map((one) => one.value)])));
}
