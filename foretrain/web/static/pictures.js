// Pictures by Chart.js, each with the table of its numbers behind it.
import { apart, rightToLeft } from "./language.js";
import { bytes, h, seconds, t, table } from "./ui.js";

let legend = { groups: {}, series: [] };
export function setLegend(found) { legend = found; }

const FORMATS = { bytes, duration: seconds, number: x => apart(String(+x.toPrecision(4))), percent: x => apart(`${(100 * x).toFixed(1)} %`) };
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const all = new Set();

// Straight lines with labels, and a text at the end of each bar.
const marks = {
  id: "marks",
  afterDatasetsDraw(chart, _, options) {
    const { ctx, chartArea: area, scales } = chart;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = style("--ink");
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    for (const [number, mark] of (options.lines || []).entries()) {
      const x = scales.x.getPixelForValue(mark.value);
      ctx.strokeStyle = style(mark.kind === "card" ? "--dim" : "--ink");
      ctx.lineWidth = mark.kind === "card" ? 1 : 2;
      ctx.setLineDash(mark.kind === "card" ? [3, 4] : []);
      ctx.beginPath(); ctx.moveTo(x, area.top - 4 - 14 * number); ctx.lineTo(x, area.bottom); ctx.stroke();
      const text = `${mark.label} ${bytes(mark.value)}`, width = ctx.measureText(text).width + 5;
      // On the side where the bars begin, if there is room.
      const left = scales.x.options.reverse ? x + width < area.right + 60 : x - width < area.left - 60;
      ctx.textAlign = left ? "left" : "right";
      ctx.fillStyle = style("--ink");
      ctx.fillText(text, left ? x + 5 : x - 5, area.top - 8 - 14 * number);
    }
    ctx.setLineDash([]);
    ctx.textAlign = "left";
    for (const [row, text] of (options.ends || []).entries()) {  // over the lines, and never beyond the edge
      const width = ctx.measureText(text.text).width, y = scales.y.getPixelForValue(row);
      const end = scales.x.getPixelForValue(text.at);
      const x = scales.x.options.reverse ? Math.max(end - 6 - width, area.left + 3) : Math.min(end + 6, area.right - width - 3);
      ctx.fillStyle = style("--card");
      ctx.fillRect(x - 2, y - 8, width + 4, 16);
      ctx.fillStyle = style("--ink");
      ctx.fillText(text.text, x, y);
    }
    ctx.restore();
  },
};

function byteTicks(axis) {
  const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find(size => axis.max >= size);
  const most = Math.max(2, Math.min(7, axis.width / 60));  // labels that do not touch
  const raw = axis.max / unit / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = unit * power * [1, 2, 3, 5, 10].find(k => k * power >= raw);
  axis.ticks = [];
  for (let value = 0; value <= axis.max; value += step) axis.ticks.push({ value });
}

// On a logarithmic axis every fourth power of two.
function byteLogTicks(axis) {
  axis.ticks = [];
  for (let value = 2 ** Math.ceil(Math.log2(axis.min)); value <= axis.max; value *= 4) axis.ticks.push({ value });
}

// Bars begin where lines of text do, on the right in Arabic. Curves do not turn: steps and hours run from left to right
// in every language's papers, as in the other tools that people look at.
function facing(options) {
  const rtl = rightToLeft(), textDirection = rtl ? "rtl" : "ltr", plugins = { ...options.plugins };
  plugins.legend = { ...plugins.legend, rtl, textDirection };
  plugins.tooltip = { ...plugins.tooltip, rtl, textDirection };
  if (!rtl || options.indexAxis !== "y") return { ...options, plugins };
  const { x, y } = options.scales;
  return { ...options, plugins, scales: { x: { ...x, reverse: true }, y: { ...y, position: "right" } } };
}

export class Picture {
  constructor(title) {
    this.canvas = h("canvas", { role: "img", "aria-label": title });
    this.frame = h("div", { class: "canvas" }, this.canvas);
    this.heading = h("h3", {}, title);
    this.behind = h("details", { class: "behind" }, h("summary", {}, t("page.numbers")));
    this.element = h("figure", { class: "picture" }, this.heading, this.frame, this.behind);
    this.chart = null;
    all.add(this);
  }

  draw(config, height, numbers) {
    this.config = config;
    this.frame.style.height = `${height}px`;
    this.behind.replaceChildren(this.behind.firstChild, table(numbers));
    const options = { ...facing(config.options), locale: "en", animation: false, maintainAspectRatio: false, responsive: true };
    if (this.chart && this.chart.config.type === config.type) {
      this.chart.data = config.data;
      this.chart.options = options;
      this.chart.update("none");
    } else {
      this.chart?.destroy();
      this.chart = new Chart(this.canvas, { ...config, options, plugins: [marks] });
    }
  }

  title(text) { this.heading.textContent = text; this.canvas.setAttribute("aria-label", text); }

  free() { this.chart?.destroy(); this.chart = null; all.delete(this); }
}

export function freeAll() { for (const picture of [...all]) picture.free(); }

const grid = () => ({ color: style("--line") });
const ticks = extra => ({ color: style("--dim"), ...extra });

// Where there is little room, a label stands in two lines.
function wrapped(label, picture) {
  if ((picture.frame.clientWidth || 600) > 480 || label.length < 12) return label;
  const spaces = [...label.matchAll(/ /g)].map(found => found.index), middle = label.length / 2;
  const at = spaces.sort((a, b) => Math.abs(a - middle) - Math.abs(b - middle))[0];
  return at === undefined ? label : [label.slice(0, at), label.slice(at + 1)];
}

// What is only kept is hatched: nobody needs it.
function hatched(colour) {
  const tile = h("canvas", { width: 8, height: 8 }), ctx = tile.getContext("2d");
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5;
  for (const x of [-4, 0, 4, 8]) { ctx.moveTo(x, 8); ctx.lineTo(x + 8, 0); }
  ctx.stroke();
  return ctx.createPattern(tile, "repeat");
}

// Stacked bars of memory: bars [{label, parts, text?, ...}], lines that they must not cross, the same end for several.
export function drawBars(picture, bars, lines, highest) {
  const groups = Object.keys(legend.groups).filter(group => bars.some(bar => bar.parts[group]));
  const datasets = groups.map(group => ({ label: legend.groups[group].label, data: bars.map(bar => bar.parts[group] || 0),
    backgroundColor: group === "kept" ? hatched(legend.groups.overhead.colour) : legend.groups[group].colour, borderColor: style("--card"), borderWidth: rightToLeft() ? { left: 1 } : { right: 1 }, barThickness: 18 }));
  const sums = bars.map(bar => Object.values(bar.parts).reduce((a, b) => a + b, 0));
  const ends = bars.map((bar, i) => ({ at: sums[i], text: bar.text || bytes(sums[i]) }));
  const label = item => ` ${item.dataset.label}: ${bytes(item.parsed.x)}`;
  const config = { type: "bar", data: { labels: bars.map(bar => wrapped(bar.label, picture)), datasets }, options: {
    indexAxis: "y", layout: { padding: { top: 10 + 14 * lines.length } },
    plugins: { legend: { position: "bottom", labels: { boxWidth: 12, color: style("--ink") } }, marks: { lines, ends },
      tooltip: { callbacks: { label } } },
    scales: { x: { stacked: true, max: highest, grid: grid(), afterBuildTicks: byteTicks,
      ticks: ticks({ callback(value) { return bytes(value, this.max).replace(/\.0+ /, " "); }, maxRotation: 0 }) },
    y: { stacked: true, grid: { display: false }, ticks: ticks({ autoSkip: false, color: style("--ink") }) } } } };
  const columns = ["", ...bars.map(bar => bar.label)];
  const rows = groups.map(group => [legend.groups[group].label, ...bars.map(bar => bar.parts[group] ? bytes(bar.parts[group]) : "–")]);
  rows.push([t("page.sum"), ...sums.map(bytes)]);
  const numeric = bars.map((_, i) => i + 1);
  picture.draw(config, 92 + 27 * bars.length + 14 * lines.length + 18 * Math.ceil(groups.length * 150 / Math.max(220, picture.frame.clientWidth || 600)),
    { columns, rows, numeric });
}

// Lines over steps: series [{label, x, y}]; the table shows the series with the fewest points.
export function drawLines(picture, series, x, format, fromZero = false) {
  const show = FORMATS[format];
  const colours = legend.lines[matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"], colour = i => colours[i % colours.length];
  const datasets = series.map((one, i) => ({ label: one.label, data: one.x.map((at, k) => ({ x: at, y: one.y[k] })), borderColor: colour(i), backgroundColor: colour(i),
    borderWidth: 1.5, pointRadius: one.x.length < 40 ? 3 : 0, pointStyle: ["circle", "rectRot", "triangle"][i % 3] }));
  const build = format === "bytes" ? { afterBuildTicks: byteTicks } : {};
  const config = { type: "line", data: { datasets }, options: { parsing: false, normalized: true,
    interaction: { mode: "nearest", axis: "x", intersect: false },
    plugins: { legend: { display: series.length > 1, position: "bottom", labels: { color: style("--ink"), usePointStyle: true } },
      tooltip: { callbacks: { label: item => ` ${item.dataset.label}: ${show(item.parsed.y)}` } } },
    scales: { x: { type: "linear", title: { display: true, text: x, color: style("--dim") }, grid: grid(), ticks: ticks({ maxRotation: 0 }) },
      y: { beginAtZero: fromZero, grid: grid(), ...build, ticks: ticks({ callback: show }) } } } };
  const shortest = series.filter(one => one.x.length).sort((a, b) => a.x.length - b.x.length)[0] || { label: "", x: [], y: [] };
  const stride = Math.max(1, Math.ceil(shortest.x.length / 60));
  const rows = shortest.x.map((at, i) => [at.toLocaleString("en"), show(shortest.y[i])]).filter((_, i) => i % stride === 0);
  picture.draw(config, 240, { columns: [x, shortest.label], rows, numeric: [0, 1] });
}

// Predicted beside measured: rows [[label, predicted, measured]].
export function drawPairs(picture, rows, shown, format) {
  const names = [t("axis.predicted"), t("axis.measured")], show = FORMATS[format];
  const datasets = names.map((label, i) => ({ label, data: rows.map(row => row[i + 1]), backgroundColor: legend.series[i] }));
  const config = { type: "bar", data: { labels: rows.map(row => row[0]), datasets }, options: { indexAxis: "y",
    plugins: { legend: { position: "bottom", labels: { color: style("--ink"), boxWidth: 12 } },
      tooltip: { callbacks: { label: item => ` ${item.dataset.label}: ${show(item.parsed.x)}` } } },
    scales: { x: { type: "logarithmic", grid: grid(), ...(format === "bytes" ? { afterBuildTicks: byteLogTicks } : {}),
      ticks: ticks({ callback: value => show(value).replace(/\.0+ /, " "), maxTicksLimit: 5, maxRotation: 0 }) },
      y: { grid: { display: false }, ticks: ticks({ autoSkip: false, color: style("--ink") }) } } } };
  picture.draw(config, 90 + 38 * rows.length, { columns: ["", ...names], rows: shown, numeric: [1, 2] });
}

// One block of a document as an element.
export function block(found) {
  if (found.kind === "paragraph") return h("p", { class: found.tone }, found.text);
  if (found.kind === "verbatim") return h("pre", { tabindex: 0 }, found.text);
  if (found.kind === "table") return table(found);
  const picture = new Picture(found.title);
  requestAnimationFrame(() => {
    if (found.kind === "bars") drawBars(picture, found.bars, found.marks);
    else if (found.kind === "pairs") drawPairs(picture, found.rows, found.shown, found.format);
    else drawLines(picture, found.series, found.x, "number");
  });
  return picture.element;
}

export function section(found, open) {
  return h("details", { class: "section", open }, h("summary", {}, h("h2", {}, found.title)), found.blocks.map(block));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("colours")));
