// Draws the pictures of a report, and those of a comparison on the local page: {kind, …} as charts.py makes them.
// A module of its own on the page; html.py puts it before report.js, without its last line.
"use strict";
const root = document.documentElement;
let colours = { light: ["#000"], dark: ["#fff"] }, texts = { by_keys: "" }, rtl = false;

// The colours of lines on light and on dark paper, the few texts that no picture has, and where lines of text begin.
function prepare(given) {
  colours = { light: given.light, dark: given.dark };
  texts = given.texts;
  rtl = root.dir === "rtl";
}

const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const SCHEME = matchMedia("(prefers-color-scheme: dark)"), PRINT = matchMedia("print");
function dark() {  // what the root says: one of them, or both, as the reader's system has it
  const scheme = css("color-scheme");
  return !PRINT.matches && (scheme === "dark" || (scheme.includes("dark") && SCHEME.matches));
}
const line = number => (dark() ? colours.dark : colours.light)[number % colours.light.length];
const SHAPES = ["circle", "rectRot", "triangle", "rect", "star", "crossRot"], DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];

// -- axes: their ticks and texts come with the picture, at several densities ------------------------------------

// The densest ticks whose texts stand apart on this axis, as long as it is.
function fitTicks(axis, densities) {
  const across = axis.isHorizontal(), length = across ? axis.width : axis.height;
  const part = axis.type === "logarithmic" ? value => Math.log(value / axis.min) / Math.log(axis.max / axis.min) : value => (value - axis.min) / (axis.max - axis.min);
  axis.ctx.font = `12px ${Chart.defaults.font.family}`;
  const wide = text => across ? axis.ctx.measureText(text).width + 16 : 28;
  const shown = densities.map(ticks => ticks.filter(([value]) => part(value) >= -1e-6 && part(value) <= 1 + 1e-6)).filter(ticks => ticks.length);
  const apart = ticks => ticks.every(([value, text], i) => !i || (part(value) - part(ticks[i - 1][0])) * length >= (wide(text) + wide(ticks[i - 1][1])) / 2);
  axis.ticks = (shown.find(apart) || [shown.at(-1)?.at(0)].filter(Boolean)).map(([value, text]) => ({ value, text }));
}
function scale(axis, extra) {
  return { type: axis.log ? "logarithmic" : "linear", grid: { color: css("--line") }, border: { color: css("--line") }, beginAtZero: axis.zero,
    title: { display: !!axis.label, text: axis.label, color: css("--dim") },
    ticks: { color: css("--dim"), maxRotation: 0, autoSkip: false, includeBounds: false, callback: (_, i, ticks) => ticks[i].text },
    afterBuildTicks: one => fitTicks(one, axis.ticks), ...extra };
}

// -- what Chart.js does not draw: limits, throttled stretches, ranges, texts at the ends of bars -----------------

const extras = {
  id: "extras",
  beforeDatasetsDraw(chart, _, o) {
    const { ctx, chartArea: a, scales: { x, y } } = chart;
    ctx.save(); ctx.beginPath(); ctx.rect(a.left, a.top, a.width, a.height); ctx.clip();
    for (const span of o.spans || []) {
      const from = x.getPixelForValue(span.start), to = Math.max(from + 2, x.getPixelForValue(span.end));
      ctx.fillStyle = css("--warn"); ctx.globalAlpha = .16; ctx.fillRect(from, a.top, to - from, a.height); ctx.globalAlpha = .9; ctx.fillRect(from, a.top, to - from, 3);
    }
    if (o.band) {
      ctx.globalAlpha = .13; ctx.fillStyle = css("--ink"); ctx.beginPath();
      for (const [at, low] of o.band.places) ctx.lineTo(x.getPixelForValue(at), y.getPixelForValue(low));
      for (const [at, , high] of [...o.band.places].reverse()) ctx.lineTo(x.getPixelForValue(at), y.getPixelForValue(high));
      ctx.fill();
    }
    ctx.restore();
  },
  afterDatasetsDraw(chart, _, o) {
    const { ctx, chartArea: a, scales: { x, y } } = chart;
    ctx.save(); ctx.font = "12px system-ui, sans-serif"; ctx.lineWidth = 1.5; ctx.textBaseline = "middle";
    for (const range of o.ranges || []) drawRange(ctx, x, y, range);
    for (const [place, level] of (o.levels || []).entries()) drawLevel(ctx, a, x, y, level, place, o.levels.length);
    for (const end of o.ends || []) {
      const width = ctx.measureText(end.text).width, at = y.getPixelForValue(end.row);
      let from = rtl ? Math.max(x.getPixelForValue(end.at) - 6 - width, a.left + 2) : Math.min(x.getPixelForValue(end.at) + 6, a.right - width - 2);
      ctx.fillStyle = css("--card"); ctx.globalAlpha = .85; ctx.fillRect(from - 2, at - 8, width + 4, 16); ctx.globalAlpha = 1;
      ctx.fillStyle = css("--ink"); ctx.textAlign = "left"; ctx.fillText(end.text, from, at);
    }
    const taken = [];
    for (const { at, text, r } of o.names || []) {
      const px = x.getPixelForValue(at.x), py = y.getPixelForValue(at.y), width = ctx.measureText(text).width;
      // Without room at its right a name stands below its point: a line that ends there comes from the left.
      const beside = px + r + 4 + width <= a.right, left = beside ? px + r + 4 : a.right - width - 2, middle = beside ? py : py + r + 12;
      const box = [left, middle - 8, left + width, middle + 8];
      if (left < a.left || taken.some(b => box[0] < b[2] && b[0] < box[2] && box[1] < b[3] && b[1] < box[3])) continue;
      taken.push(box); ctx.fillStyle = css("--card"); ctx.globalAlpha = .75; ctx.fillRect(left - 2, middle - 8, width + 4, 16); ctx.globalAlpha = 1; ctx.fillStyle = css("--ink"); ctx.textAlign = "left"; ctx.fillText(text, left, middle);
    }
    ctx.restore();
  },
};
function drawLevel(ctx, a, x, y, level, place, all) {
  ctx.strokeStyle = ctx.fillStyle = css("--ink"); ctx.setLineDash(place % 2 ? [2, 3] : [6, 4]); ctx.beginPath();
  if (level.along === "x") {
    const at = x.getPixelForValue(level.value);
    const top = a.top - 6 - 15 * (all - 1 - place);
    if (at < a.left - 1 || at > a.right + 1) {   // farther away than the picture goes
      ctx.setLineDash([]); ctx.textAlign = rtl ? "left" : "right"; ctx.fillText(rtl ? "← " + level.label : level.label + " →", rtl ? a.left : a.right, top); return;
    }
    const width = ctx.measureText(level.label).width, fits = at + 5 + width <= a.right;
    ctx.moveTo(at, top - 5); ctx.lineTo(at, a.bottom); ctx.stroke(); ctx.setLineDash([]); ctx.textAlign = "left";
    ctx.fillText(level.label, fits ? at + 5 : Math.max(2, at - 5 - width), top);
  } else {
    const at = y.getPixelForValue(level.value), inside = at >= a.top - 1 && at <= a.bottom + 1;
    if (inside) { ctx.moveTo(a.left, at); ctx.lineTo(a.right, at); ctx.stroke(); }
    ctx.setLineDash([]); ctx.textAlign = "right";
    if (inside) {   // on paper of its own: neither its line nor a curve strikes it through
      const middle = at - 11 < a.top + 7 ? at + 11 : at - 11, width = ctx.measureText(level.label).width;
      ctx.fillStyle = css("--card"); ctx.fillRect(a.right - 7 - width, middle - 8, width + 6, 16);
      ctx.fillStyle = css("--ink"); ctx.fillText(level.label, a.right - 4, middle);
    }
  }
  ctx.setLineDash([]);
}
function drawRange(ctx, x, y, range) {   // from low to high with little ends, across or upright
  const across = range.row !== undefined, low = (across ? x : y).getPixelForValue(range.low), high = (across ? x : y).getPixelForValue(range.high);
  const at = across ? y.getPixelForValue(range.row) : x.getPixelForValue(range.at);
  ctx.strokeStyle = across ? css("--ink") : range.colour; ctx.beginPath();
  if (across) { ctx.moveTo(low, at); ctx.lineTo(high, at); for (const end of [low, high]) { ctx.moveTo(end, at - 4); ctx.lineTo(end, at + 4); } }
  else { ctx.moveTo(at, low); ctx.lineTo(at, high); for (const end of [low, high]) { ctx.moveTo(at - 3, end); ctx.lineTo(at + 3, end); } }
  ctx.stroke();
}

// -- kinds of pictures: each gives {config, height, stops}: a stop is what one press of an arrow key points to --------

const legend = (display, extra) => ({ display, position: "bottom", rtl, textDirection: rtl ? "rtl" : "ltr",
  labels: { color: css("--ink"), boxWidth: 12, boxHeight: extra ? 7 : 12, padding: 12, ...extra } });
const tooltip = callbacks => ({ callbacks, rtl, textDirection: rtl ? "rtl" : "ltr", boxPadding: 4, backgroundColor: "#1b1f24", titleColor: "#fff", bodyColor: "#fff", footerColor: "#fff",
  borderColor: "#6e7781", borderWidth: 1 });
// What an item's layer or curve holds there; nothing of one that holds nothing.
const said = (parts, words) => item => { const found = parts[item.datasetIndex].said[item.dataIndex], text = words ? words[found] : found; return text ? ` ${item.dataset.label}: ${text}` : null; };
function legendRows(labels, width) {   // a label too long for what is left of a row begins another
  let rows = 1, left = Math.max(200, width);
  for (const needs of labels.map(label => 40 + 6.6 * label.length)) {
    if (needs > left) { rows += 1; left = Math.max(200, width); }
    left -= needs;
  }
  return rows;
}
// TensorBoard's smoothing: an exponential mean whose weights are made up to one while few values have come.
function smoothed(values, weight) {
  let mean = 0;
  return values.map((value, i) => { mean = weight * mean + (1 - weight) * value; return mean / (1 - weight ** (i + 1)); });
}
const sideways = { indexAxis: "y" };
const rows = (labels, width) => ({ grid: { display: false }, position: rtl ? "right" : "left", border: { color: css("--line") },
  ticks: { autoSkip: false, color: css("--ink"), callback(_, i) { return folded(labels[i], width); } } });
function folded(label, width) {
  const most = width < 420 ? 13 : 30;
  if (label.length <= most) return label;
  const lines = [""];
  for (const word of label.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length + 1 > most) lines.push(word); else lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.slice(0, 3).map(one => one.length > most + 6 ? one.slice(0, most + 5) + "…" : one);
}

// Ticks whose words (a list of lines each) do not touch: the first word begins at its place, the last ends there, others
// stand in the middle, as Chart.js sets them. One alone would be set as the last.
function apartTicks(axis, places, words) {
  axis.ctx.font = `12px ${Chart.defaults.font.family}`;
  const boxes = places.map(value => ({ value, at: (value - axis.min) / (axis.max - axis.min) * axis.width,
    width: 8 + Math.max(...words(value).map(one => axis.ctx.measureText(one).width)) }));
  const kept = [], free = left => !kept.length || left >= kept.at(-1).at + kept.at(-1).width * (kept.length > 1 ? .5 : 1);
  for (const box of boxes) if (free(box.at - box.width / 2)) kept.push(box);
  const last = kept.pop(), left = last.at - last.width;
  while (kept.length > 1 && !free(left)) kept.pop();
  return kept.length && free(left) ? [...kept, last].map(({ value }) => ({ value })) : [];
}
// Height of a row whose label is folded into lines.
const rowHeight = (labels, width, least) => Math.max(least, 6 + 15 * Math.max(...labels.map(label => [folded(label, width)].flat().length)));

// What is only kept is hatched: nothing needs it.
function hatched(colour) {
  const tile = document.createElement("canvas"), ctx = tile.getContext("2d");
  tile.width = tile.height = 8; ctx.strokeStyle = colour; ctx.lineWidth = 1.5; ctx.beginPath();
  for (const x of [-4, 0, 4, 8]) { ctx.moveTo(x, 8); ctx.lineTo(x + 8, 0); }
  ctx.stroke();
  return ctx.createPattern(tile, "repeat");
}

const kinds = {
  stacked(p, width) {
    const datasets = p.groups.map(group => ({ label: group.label, data: group.values, backgroundColor: group.hatched ? hatched(group.colour) : group.colour, borderColor: css("--card"),
      borderWidth: { right: 1 }, barThickness: 20 }));
    const sums = p.labels.map((_, i) => p.groups.reduce((sum, group) => sum + group.values[i], 0));
    const most = p.most, plot = Math.max(140, width - 130);
    const highest = Math.max(most * plot / (plot - 70), ...p.levels.filter(level => level.value < 4 * most).map(level => level.value * 1.02));   // room for a size behind the longest bar
    const ends = sums.map((at, row) => ({ at, row, text: p.ends[row] }));
    return { height: 70 + rowHeight(p.labels, width, 36) * p.labels.length + 15 * p.levels.length + 22 * legendRows(p.groups.map(g => g.label), width),
      stops: p.labels.map((_, index) => datasets.map((_, datasetIndex) => ({ datasetIndex, index }))),
      config: { type: "bar", data: { labels: p.labels, datasets }, options: { ...sideways, interaction: { mode: "index", axis: "y", intersect: false },
        layout: { padding: { top: 4 + 15 * p.levels.length, left: rtl ? 26 : 0 } },   // Chart.js leaves room for a word at the right end only
        scales: { x: scale(p.x, { stacked: true, max: highest, reverse: rtl }), y: { ...rows(p.labels, width), stacked: true } },
        plugins: { legend: legend(true), extras: { levels: p.levels, ends }, tooltip: tooltip({
          label: said(p.groups), footer: items => items.length ? p.ends[items[0].dataIndex] : "" }) } } } };
  },
  moments(p, width) {
    const n = p.labels.length, xs = [...Array(n).keys()];
    const datasets = p.groups.map((group, i) => ({ label: group.label, data: xs.map(x => ({ x, y: group.values[x] })), backgroundColor: group.colour, borderColor: group.colour,
      borderWidth: 0, pointRadius: 0, stepped: true, fill: i ? "-1" : "origin" }));
    const totals = xs.map(i => p.groups.reduce((sum, group) => sum + group.values[i], 0));
    const room = Math.max(...totals, ...p.levels.map(level => level.value)) * 1.06;
    const starts = xs.filter(i => !i || p.parts[i] !== p.parts[i - 1]);
    const words = value => width < 420 ? p.words[p.parts[value]].split(" ") : [p.words[p.parts[value]]];
    const ticks = axis => { axis.ticks = apartTicks(axis, starts, words); };
    return { height: 340 + 22 * legendRows(p.groups.map(g => g.label), width), stops: xs.map(index => datasets.map((_, datasetIndex) => ({ datasetIndex, index }))),
      config: { type: "line", data: { datasets }, options: { parsing: false, normalized: true, interaction: { mode: "index", intersect: false },
        scales: { x: { ...scale({ label: p.x, ticks: [] }), min: 0, max: n - 1, afterBuildTicks: ticks, ticks: { color: css("--dim"), maxRotation: 0, autoSkip: false, align: "inner", callback: words } },
          y: scale(p.y, { stacked: true, min: 0, max: room }) },
        plugins: { legend: legend(true), extras: { levels: p.levels }, tooltip: { ...tooltip({ title: items => items.length ? p.words[p.labels[items[0].dataIndex]] : "",
          label: said(p.groups, p.words), footer: items => items.length ? `${p.total}: ${p.words[p.totals[items[0].dataIndex]]}` : "" }),
          itemSort: (one, other) => other.datasetIndex - one.datasetIndex } } } } };
  },
  curves(p, width) {
    const chosen = p.chosen || 0, axis = p.axes[chosen], many = p.traces.length > 1, weight = p.smooth ? p.weight || 0 : 0;
    const some = length => Array.from({ length }, (_, i) => i % Math.ceil(length / 30) ? 0 : 3);   // thirty markers at most
    const datasets = p.traces.map((trace, i) => ({ label: trace.label, order: -i, data: trace.values.map((y, k) => ({ x: trace.places[chosen][k], y })), borderColor: line(trace.colour),
      backgroundColor: line(trace.colour), borderWidth: trace.dashed ? 2.2 : 1.6, borderDash: many && !trace.dashed && trace.colour >= colours.light.length ? DASHES[1 + Math.floor(trace.colour / colours.light.length) % 3] : [],
      pointStyle: SHAPES[trace.colour % SHAPES.length], pointHoverRadius: 4,
      pointRadius: trace.dashed ? some(trace.values.length) : trace.values.length < 60 && !many ? 3 : 0 }));
    // What is smoothed stands before what was measured, which is faint and has no words of its own.
    const faint = datasets.filter((_, i) => weight && !p.traces[i].dashed).map(one => ({ ...one, borderColor: one.borderColor + "50", borderWidth: 1, pointRadius: 0, pointHoverRadius: 0, order: 1 }));
    const shown = datasets.map((one, i) => weight && !p.traces[i].dashed ? { ...one, borderWidth: 2, pointRadius: 0, data: smoothed(p.traces[i].values, weight).map((y, k) => ({ x: one.data[k].x, y })) } : one);
    // In the legend, too, what has no markers is a line: training and validation of a run have one colour.
    const keys = chart => Chart.defaults.plugins.legend.labels.generateLabels(chart).filter(key => key.datasetIndex < shown.length).map(key => p.traces[key.datasetIndex].dashed ? key : { ...key, pointStyle: "line", lineWidth: 2.5 });
    const longest = datasets.reduce((best, one, i) => one.data.length > datasets[best].data.length ? i : best, 0);
    const stops = datasets[longest].data.map((at, index) => [{ datasetIndex: longest, index }, ...datasets.flatMap((one, i) => i === longest || !one.data.length ? [] :
      [{ datasetIndex: i, index: one.data.reduce((best, other, k) => Math.abs(other.x - at.x) < Math.abs(one.data[best].x - at.x) ? k : best, 0) }])]);
    const used = [...new Set(p.spans.map(span => span.label))];
    return { height: p.small ? 190 : 320 + 22 * legendRows(p.traces.map(t => t.label), width), stops,
      config: { type: "line", data: { datasets: [...shown, ...faint] }, options: { parsing: false, normalized: true, interaction: { mode: "nearest", axis: "x", intersect: false },
        scales: { x: scale(p.small ? { ...axis, label: "" } : axis, { bounds: "data" }), y: scale(p.small ? { ...p.y, label: "" } : p.y, { grace: "6%" }) },
        plugins: { legend: { ...legend(many, { usePointStyle: true, generateLabels: keys }), reverse: true }, extras: { levels: p.levels, spans: p.spans },
          tooltip: { filter: item => item.datasetIndex < shown.length, ...tooltip({ title: items => items.length ? `${p.traces[items[0].datasetIndex].at[chosen][items[0].dataIndex]} ${axis.named}` : "",
            label: said(p.traces),
            footer: items => { const at = items.length ? items[0].parsed.x : NaN; return used.filter(label => p.spans.some(s => s.label === label && s.start <= at && at <= s.end)); } }) } } } } };
  },
  scatter(p, width) {
    const biggest = Math.max(0, ...p.clouds.flatMap(cloud => cloud.dots.map(dot => dot.size || 0)));
    const radius = dot => biggest ? 4 + 11 * Math.sqrt((dot.size || 0) / biggest) : dot.strong ? 6 : 4;
    const clouds = p.clouds.map(cloud => ({ label: cloud.label, data: cloud.dots, type: "scatter", backgroundColor: line(cloud.colour) + (biggest ? "b0" : ""), borderColor: line(cloud.colour),
      pointStyle: SHAPES[cloud.colour % SHAPES.length], pointRadius: cloud.dots.map(radius), pointHoverRadius: cloud.dots.map(dot => radius(dot) + 2), borderWidth: 1.2 }));
    const lines = p.lines.map((one, i) => ({ label: one.label, data: one.places.map(([x, y]) => ({ x, y })), type: "line", borderColor: css("--ink"), backgroundColor: css("--ink"), borderWidth: 1.5,
      borderDash: DASHES[i % 4], pointRadius: 0, pointHitRadius: 0, pointStyle: "line" }));
    const ranges = p.clouds.flatMap(cloud => cloud.dots.filter(dot => dot.low !== undefined).map(dot => ({ at: dot.x, low: dot.low, high: dot.high, colour: line(cloud.colour) })));
    const names = p.clouds.flatMap(cloud => cloud.dots.filter(dot => dot.strong).map(dot => ({ at: dot, text: dot.label, r: radius(dot) })));
    const labels = [...p.clouds, ...p.lines].map(one => one.label), band = p.band ? 1 : 0;
    const all = [0, 1].map(i => [...p.clouds.flatMap(cloud => cloud.dots.flatMap(dot => i ? [dot.y, dot.low ?? dot.y, dot.high ?? dot.y] : [dot.x])), ...p.lines.flatMap(one => one.places.map(at => at[i]))]);
    const wide = i => ({ min: Math.min(...all[i]) / (p.band ? 1 : 1.4), max: Math.max(...all[i]) * (p.band ? 1 : 1.4) });
    const along = p.levels.filter(level => level.along === "x").length;
    const extra = { label: p.band?.label, data: [], type: "line", backgroundColor: css("--line"), borderColor: css("--line"), pointStyle: "rect" };
    return { height: 360 + 22 * legendRows(labels, width), stops: p.clouds.flatMap((cloud, datasetIndex) => cloud.dots.map((_, index) => [{ datasetIndex, index }])),
      config: { type: "scatter", data: { datasets: [...clouds, ...lines, ...(band ? [extra] : [])] }, options: { layout: { padding: { top: 15 * along, right: 8 } },
        interaction: { mode: "nearest", intersect: true },
        scales: { x: scale(p.x, p.x.log ? wide(0) : { grace: "6%" }), y: scale(p.y, p.y.log ? wide(1) : { grace: "10%" }) },
        plugins: { legend: legend(labels.length > 1, { usePointStyle: true }), extras: { levels: p.levels, band: p.band, ranges, names },
          tooltip: tooltip({ title: items => items.length && items[0].raw.label || "", label: item => item.raw.said?.map(line => ` ${line}`) ?? item.dataset.label }) } } } };
  },
  ranks(p, width) {
    const tones = { good: css("--good"), warn: css("--warn"), bad: css("--bad"), plain: line(0) };
    const most = Math.max(...p.rows.map(row => Math.max(row.value, row.high ?? 0)), ...p.levels.map(level => level.value));
    const least = Math.min(...p.rows.map(row => Math.min(row.value, row.low ?? row.value))) / 1.3, names = p.rows.map(row => row.label);
    const colours = p.rows.map(row => (row.colour == null ? tones[row.tone] : line(row.colour)) + (row.strong ? "" : "99"));
    const ends = p.rows.map((row, i) => ({ row: i, at: Math.max(row.value, row.high ?? 0), text: row.end }));
    // The axis goes on until what stands behind each bar has room.
    const plot = Math.max(140, width - Math.min(width < 420 ? 130 : 240, 50 + 7 * Math.max(...names.map(name => name.length))));
    const stretch = text => plot / Math.max(plot / 2, plot - 14 - 6.6 * text.length);
    const span = p.axis.log ? { min: least, max: Math.max(most * 1.1, ...ends.map(end => least * (end.at / least) ** stretch(end.text))) }
      : { beginAtZero: true, max: Math.max(most * 1.05, ...ends.map(end => end.at * stretch(end.text))) };
    const ranges = p.rows.flatMap((row, i) => row.low == null ? [] : [{ row: i, low: row.low, high: row.high }]);
    return { height: 60 + rowHeight(names, width, width < 420 ? 40 : 30) * p.rows.length + 15 * p.levels.length, stops: p.rows.map((_, index) => [{ datasetIndex: 0, index }]),
      config: { type: "bar", data: { labels: names, datasets: [{ label: p.axis.label, data: p.rows.map(row => row.value), backgroundColor: colours, barThickness: 15 }] },
        options: { ...sideways, interaction: { mode: "index", axis: "y", intersect: false }, layout: { padding: { top: 15 * p.levels.length, left: rtl ? 24 : 0 } },
          scales: { x: scale(p.axis, { ...span, reverse: rtl }), y: rows(names, width) },
          plugins: { legend: legend(false), extras: { levels: p.levels.map(level => ({ ...level, along: "x" })), ends, ranges },
            tooltip: tooltip({ label: item => ` ${ends[item.dataIndex].text}`, footer: items => items.length ? p.rows[items[0].dataIndex].range : "" }) } } } };
  },
};

// -- a picture on its canvas --------------------------------------------------------------------------------

// Drawn anew where it must be, and walked through by arrow keys: what they point to is said in `said`.
class Drawing {
  constructor(picture, canvas, said) {
    Object.assign(this, { picture, canvas, said, chart: null, at: -1 });
    canvas.title = texts.by_keys;
    canvas.addEventListener("keydown", event => this.walk(event));
    canvas.addEventListener("blur", () => { said.textContent = ""; });
  }

  draw() {
    const frame = this.canvas.parentElement;
    if (!frame.clientWidth) return;   // in a part that is closed; `fit` draws when it opens
    const { config, height, stops } = kinds[this.picture.kind](this.picture, frame.clientWidth);
    Chart.defaults.color = css("--ink"); Chart.defaults.borderColor = css("--line");
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    frame.style.height = `${height}px`;
    const options = { ...config.options, animation: false, maintainAspectRatio: false };
    if (this.chart) {   // what the reader points to stays
      Object.assign(this.chart, { data: config.data, options });
      this.chart.resize();
      this.chart.update("none");
    } else this.chart = new Chart(this.canvas, { ...config, options, plugins: [extras] });
    Object.assign(this, { stops, at: Math.min(this.at, stops.length - 1), width: frame.clientWidth });
  }

  get words() { return texts; }

  choose(axis) { this.picture.chosen = axis; this.draw(); }

  // From 0, as it was measured, to 1.
  smooth(weight) { this.picture.weight = weight; this.draw(); }

  // Another picture of the same kind, over the axis that was chosen and as smooth.
  show(picture) { this.picture = { ...picture, chosen: this.picture.chosen, weight: this.picture.weight }; this.draw(); }

  // Labels are folded, and legends given their room, by the width.
  fit() { if (!this.chart || Math.abs(this.width - this.canvas.parentElement.clientWidth) > 60) this.draw(); }

  walk(event) {
    const { chart, stops, said } = this, far = Math.max(1, Math.round(stops.length / 12));
    const by = { ArrowRight: rtl ? -1 : 1, ArrowLeft: rtl ? 1 : -1, ArrowDown: 1, ArrowUp: -1, PageDown: far, PageUp: -far, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") { chart.setActiveElements([]); chart.tooltip.setActiveElements([], { x: 0, y: 0 }); chart.update("none"); said.textContent = ""; return; }
    if (by === undefined || !stops.length) return;
    event.preventDefault();
    this.at = Math.min(stops.length - 1, Math.max(0, (by === -Infinity ? 0 : by === Infinity ? stops.length - 1 : this.at < 0 ? 0 : this.at + by)));
    const elements = stops[this.at], point = chart.getDatasetMeta(elements[0].datasetIndex).data[elements[0].index];
    chart.setActiveElements(elements); chart.tooltip.setActiveElements(elements, { x: point.x, y: point.y }); chart.update("none");
    const { title = [], body = [], footer = [] } = chart.tooltip;
    said.textContent = [...title, ...body.flatMap(one => one.lines), ...footer].map(text => text.trim()).filter(Boolean).join(" · ");
  }

  free() { this.chart?.destroy(); this.chart = null; }
}

export { Drawing, dark, prepare, smoothed };
