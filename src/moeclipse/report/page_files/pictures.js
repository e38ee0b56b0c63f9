// Heat maps and timelines as canvas: too many cells and slices for elements of their own. Both are focusable and
// read out what is under the pointer or the keys.
"use strict";

function canvasBox(id, label, height) {
  const canvas = el("canvas", { height });
  const box = el("div", { class: "chart", id, tabindex: "0", role: "application", "aria-label": label }, canvas);
  return [box, canvas];
}

// A canvas of so many CSS pixels, sharp on any screen.
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11.5px system-ui, sans-serif";
  return pen;
}

function bytes(text) {
  const raw = atob(text);
  return Uint8Array.from(raw, (one) => one.charCodeAt(0));
}

// 128 is the mean, 32 a doubling; 0: nothing.
const ratioOf = (byte) => (byte === 0 ? 0 : 2 ** ((byte - 128) / 32));

function mix(a, b, share) {
  const parse = (one) => [1, 3, 5].map((at) => parseInt(one.slice(at, at + 2), 16));
  const [p, q] = [parse(a), parse(b)];
  return `rgb(${p.map((value, index) => Math.round(value + (q[index] - value) * share)).join(",")})`;
}

function heatPaint(byte) {
  if (byte === 0) return colour("ink");
  const away = clamp((byte - 128) / 64, -1, 1);
  return mix(colour("card"), away < 0 ? colour("a") : colour("exposed"), Math.abs(away) ** 0.8);
}

// cells[column * rows + row], each relative to the mean of its column.
function heatMap({ id, label, rows, columns, cells, rowName, columnName }) {
  const size = clamp(Math.floor(360 / rows), 3, 18), left = 62, height = rows * size + 22;
  const [box, canvas] = canvasBox(id, `${label}, heat map. Arrow keys read cells.`, height);
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  let chosen = null, across = 1;
  const paints = Array.from({ length: 256 });
  function draw(width) {
    const pen = sized(canvas, width, height);
    for (let byte = 0; byte < 256; byte++) paints[byte] = heatPaint(byte);
    across = (width - left - 6) / columns.length;
    columns.forEach((_, column) => {
      for (let row = 0; row < rows; row++) {
        pen.fillStyle = paints[cells[column * rows + row]];
        pen.fillRect(left + column * across, row * size, Math.ceil(across + 0.3), size);
      }
    });
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    const every = Math.max(Math.ceil(14 / size), Math.ceil(rows / 16));
    for (let row = 0; row < rows; row += every) pen.fillText(`${rowName} ${row}`, left - 7, row * size + size / 2 + 4);
    pen.textAlign = "center";
    const apart = Math.max(Math.ceil(columns.length / Math.max(width / 90, 1)), 1);
    for (let column = 0; column < columns.length; column += apart)
      pen.fillText(short(columns[column]), clamp(left + (column + 0.5) * across, left + 8, width - 14), height - 6);
    pen.strokeStyle = colour("line");
    pen.strokeRect(left - 0.5, -0.5, width - left - 5, rows * size + 1);
    if (chosen) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 1.5;
      pen.strokeRect(left + chosen[0] * across, chosen[1] * size, across, size);
    }
  }
  function choose(column, row) {
    chosen = [clamp(column, 0, columns.length - 1), clamp(row, 0, rows - 1)];
    const byte = cells[chosen[0] * rows + chosen[1]];
    const many = byte === 0 ? "no rows" : `${byte >= 255 ? "at least " : ""}${ratioOf(byte).toFixed(2)} times the mean`;
    readout.textContent = `${columnName} ${columns[chosen[0]]}, ${rowName} ${chosen[1]}: ${many}`;
    draw(box.clientWidth);
  }
  box.addEventListener("pointermove", (event) => {
    const inside = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - inside.left - left, event.clientY - inside.top];
    if (x >= 0 && y >= 0 && y < rows * size) choose(Math.floor(x / across), Math.floor(y / size));
  });
  box.addEventListener("pointerleave", () => { chosen = null; readout.textContent = ""; draw(box.clientWidth); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (move) { const [a, b] = chosen || [-move[0], -move[1]]; choose(a + move[0], b + move[1]); event.preventDefault(); }
  });
  drawn(box, draw);
  const table = () => Array.from({ length: rows }, (_, row) => {
    const values = columns.map((_, column) => ratioOf(cells[column * rows + row]));
    return [`${rowName} ${row}`, values[0], values.reduce((a, b) => a + b, 0) / values.length, values[values.length - 1], Math.max(...values)];
  });
  return el("figure", {}, box, readout, behind(id, ["times the mean", "first", "mean", "last", "highest"], table));
}

function heatScale() {
  const canvas = el("canvas", { width: 180, height: 10, role: "img", "aria-label": "colours from a quarter of the mean to four times the mean" });
  const draw = () => { const pen = canvas.getContext("2d"); for (let x = 0; x < 180; x++) { pen.fillStyle = heatPaint(Math.round(64 + x / 179 * 128)); pen.fillRect(x, 0, 1, 10); } };
  redraws.push(draw);
  requestAnimationFrame(draw);
  return el("div", { class: "scale" }, "¼ of the mean", canvas, "4 times the mean", swatch("no rows", "var(--ink)"));
}

// How deep each slice lies inside others of its row.
function depths(slices) {
  const open = [];
  return slices.map(([start, length]) => {
    while (open.length && open[open.length - 1] <= start + length / 2) open.pop();
    open.push(start + length);
    return open.length - 1;
  });
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let size = text.length;
  while (size > 1 && pen.measureText(`${text.slice(0, size)}…`).width > width) size--;
  return `${text.slice(0, size)}…`;
}

function timelineChart({ id, label, figures }) {
  const paint = { compute: "compute", transfer: "transfer", wait: "straggle", kernel: "kernel" };
  const high = 15, gap = 5;
  let left = 150;
  let top = 0, end = 0, group = "";
  const rows = figures.rows.map((row) => {
    const slices = [...row.slices].sort((a, b) => a[0] - b[0] || b[1] - a[1]);
    const name = row.simulated ? `simulated, rank ${row.rank} of the pipeline` : `measured, rank ${row.rank}`;
    const first = name !== group;
    group = name;
    if (first) top += 20;
    const depth = depths(slices), deepest = Math.min(Math.max(0, ...depth), 3);
    const found = { ...row, slices, depth, top, name, first, height: (deepest + 1) * high };
    top += found.height + gap;
    for (const [start, length] of slices) end = Math.max(end, start + length);
    return found;
  });
  const height = top + 26;
  const [box, canvas] = canvasBox(id, `${label}. Left and right move, plus and minus zoom, up and down choose a row, space goes to its next slice, Escape shows all.`, height);
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  let range = kept.get(`range ${id}`) || [0, end], chosen = null, drag = null, width = 600;
  const x = (time) => left + (time - range[0]) / (range[1] - range[0]) * (width - left - 6);

  function draw(now) {
    width = now;
    left = clamp(Math.round(width * 0.2), 92, 170);
    const pen = sized(canvas, width, height);
    pen.lineWidth = 1;
    for (const time of ticks(range[0], range[1], Math.max((width - left) / 110, 2))) {
      pen.strokeStyle = colour("grid");
      pen.beginPath(); pen.moveTo(x(time), 0); pen.lineTo(x(time), height - 18); pen.stroke();
      pen.fillStyle = colour("soft");
      pen.textAlign = "center";
      pen.fillText(`${trim(time / 1000)} ms`, clamp(x(time), left + 18, width - 26), height - 4);
    }
    const paints = figures.kinds.map((kind) => colour(paint[kind]));
    for (const row of rows) {
      pen.textAlign = "left";
      pen.fillStyle = colour("ink");
      if (row.first) pen.fillText(row.name, 0, row.top - 6);
      pen.fillStyle = colour("soft");
      pen.fillText(fitted(pen, row.lane, left - 14), 8, row.top + 11);
      row.slices.forEach(([start, length, name, kind], index) => {
        if (start + length < range[0] || start > range[1]) return;
        const a = Math.max(x(start), left), b = Math.min(x(start + length), width - 6);
        const y = row.top + Math.min(row.depth[index], 3) * high;
        pen.globalAlpha = row.depth[index] ? 0.72 : 1;
        pen.fillStyle = paints[kind];
        pen.fillRect(a, y, Math.max(b - a - 0.4, 0.7), high - 2);
        pen.globalAlpha = 1;
        if (b - a > 34) {
          pen.save();
          pen.beginPath(); pen.rect(a, y, b - a - 3, high); pen.clip();
          pen.fillStyle = colour("card");
          pen.fillText(figures.names[name], a + 4, y + 10.5);
          pen.restore();
        }
        if (chosen && chosen[0] === row && chosen[1] === index) { pen.strokeStyle = colour("ink"); pen.lineWidth = 1.6; pen.strokeRect(a, y, Math.max(b - a, 1.5), high - 2); }
      });
    }
  }
  function choose(row, index) {
    chosen = row && index >= 0 ? [row, index] : null;
    if (chosen) {
      const [start, length, name, kind] = row.slices[index];
      readout.textContent = `${row.name}, ${row.lane}: ${figures.names[name]} (${figures.kinds[kind]}), ${trim(length / 1000)} ms from ${trim(start / 1000)} ms on`;
    } else readout.textContent = "";
    draw(width);
  }
  function view(from, to) {
    const size = clamp(to - from, Math.min(end / 5000, 20), end);
    const start = clamp(from, 0, end - size);
    range = [start, start + size];
    kept.set(`range ${id}`, size >= end ? undefined : range);
    draw(width);
  }
  const zoom = (factor, around = (range[0] + range[1]) / 2) => view(around - (around - range[0]) * factor, around + (range[1] - around) * factor);
  const timeAt = (event) => range[0] + (event.clientX - canvas.getBoundingClientRect().left - left) / (width - left - 6) * (range[1] - range[0]);
  function under(event) {
    const y = event.clientY - canvas.getBoundingClientRect().top, time = timeAt(event);
    const near = (range[1] - range[0]) / width * 2;
    for (const row of rows) {
      if (y < row.top || y >= row.top + row.height) continue;
      const depth = Math.floor((y - row.top) / high);
      return [row, row.slices.findIndex(([start, length], index) => Math.min(row.depth[index], 3) === depth && time >= start - near && time <= start + length + near)];
    }
    return [null, -1];
  }
  box.addEventListener("pointerdown", (event) => { if (event.button === 0) { drag = { at: event.clientX, range: [...range] }; box.setPointerCapture(event.pointerId); } });
  box.addEventListener("pointermove", (event) => {
    if (!drag) return choose(...under(event));
    const moved = (drag.at - event.clientX) / (width - left) * (drag.range[1] - drag.range[0]);
    view(drag.range[0] + moved, drag.range[1] + moved);
  });
  box.addEventListener("pointerup", () => { drag = null; });
  box.addEventListener("pointerleave", () => { if (!drag) choose(null, -1); });
  box.addEventListener("dblclick", () => view(0, end));
  // A wheel alone scrolls the page, as everywhere; with Ctrl or a pinch it zooms.
  box.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event)); event.preventDefault(); } }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const [row, index] = chosen || [rows[0], -1], at = rows.indexOf(row), size = range[1] - range[0];
    const slice = (one, number) => {
      choose(one, clamp(number, 0, one.slices.length - 1));
      const [start, length] = one.slices[chosen[1]];
      if (start < range[0] || start + length > range[1]) view(start - size / 4, start + size * 3 / 4);
    };
    const does = {
      ArrowRight: () => view(range[0] + size / 6, range[1] + size / 6), ArrowLeft: () => view(range[0] - size / 6, range[1] - size / 6),
      ArrowDown: () => slice(rows[clamp(at + 1, 0, rows.length - 1)], 0), ArrowUp: () => slice(rows[clamp(at - 1, 0, rows.length - 1)], 0),
      " ": () => slice(row, index + 1), "+": () => zoom(0.5), "-": () => zoom(2), Escape: () => { choose(null, -1); view(0, end); },
    }[event.key === "=" ? "+" : event.key];
    if (does) { does(); event.preventDefault(); }
  });
  drawn(box, draw);
  const tools = el("div", { class: "tools" }, el("button", { type: "button", onclick: () => zoom(0.5) }, "zoom in"), el("button", { type: "button", onclick: () => zoom(2) }, "zoom out"),
    el("button", { type: "button", onclick: () => view(0, end) }, "whole step"), el("span", { class: "soft" }, "drag to move, Ctrl and wheel to zoom"));
  const used = new Set(rows.flatMap((row) => row.slices.map((slice) => slice[3])));
  const legend = el("div", { class: "legend" }, figures.kinds.map((kind, index) => used.has(index) ? swatch(kind, `var(--${paint[kind]})`) : null));
  const table = () => rows.map((row) => [row.name, row.lane, row.slices.length, row.slices.reduce((sum, slice, index) => sum + (row.depth[index] ? 0 : slice[1]), 0) / 1000]);
  return el("figure", {}, tools, legend, box, readout, behind(id, ["rank", "lane", "slices", "busy (ms)"], table));
}
