// Charts in SVG, drawn again when their data or their width has changed. What they show is also said in aria-label.
import { svg } from "./text.js";

const HEIGHT = 210;
const MARGIN = { top: 10, right: 46, bottom: 30, left: 44 };
let clips = 0;

// Calls draw(width) now and whenever the place's width changes; the result's update(data) draws again if data differs.
export function chart(figure, draw) {
  const place = figure.querySelector(".chart");
  let data = null;
  let drawn = "";
  const redraw = () => {
    const width = place.clientWidth;
    const key = JSON.stringify([data, width]);
    if (!data || !width || key === drawn) return;
    drawn = key;
    place.replaceChildren(draw(data, width));
  };
  new ResizeObserver(redraw).observe(place);
  return {
    update(next) {
      data = next;
      redraw();
    },
  };
}

export function empty(text) {
  const note = document.createElement("p");
  note.className = "empty";
  note.textContent = text;
  return note;
}

// Lines with bands over batch sizes: {series: [{name, colour, points: [[x, value, low, high, tried], …]}], format, cursor, label}
export function lines({ series, format, cursor, label, zero, onPick }, width) {
  const all = series.flatMap((one) => one.points);
  if (!all.length) return empty("Nothing learned yet.");
  const xs = [...new Set(all.map(([x]) => x))].sort((a, b) => a - b);
  const x = scale(Math.log2(xs[0]), Math.log2(xs.at(-1)), MARGIN.left, width - MARGIN.right);
  // By the values: the bands of what was never tried may reach anywhere, and are cut off.
  const values = all.map(([, value]) => value);
  const low = zero ? Math.min(0, ...values) : 0;
  const high = Math.max(0, ...values);
  const ticks = round_ticks(low, high * 1.06 || 1, 5);
  const y = scale(Math.min(low, ticks[0]), Math.max(high * 1.06, ticks.at(-1)), HEIGHT - MARGIN.bottom, MARGIN.top);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": label });
  const clip = `clip${++clips}`;
  picture.append(
    svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left, y: 0, width: width - MARGIN.left - MARGIN.right + 5, height: HEIGHT - MARGIN.bottom })),
  );
  for (const tick of ticks) {
    picture.append(
      svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick), class: zero && tick === 0 ? "zero" : "grid" }),
      svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
    );
  }
  for (let power = Math.ceil(Math.log2(xs[0])); 2 ** power <= xs.at(-1); power++) {
    picture.append(svg("text", { x: x(power), y: HEIGHT - MARGIN.bottom + 15, "text-anchor": "middle" }, String(2 ** power)));
  }
  picture.append(svg("text", { x: (MARGIN.left + width - MARGIN.right) / 2, y: HEIGHT - 2, "text-anchor": "middle" }, "batch size"));
  if (cursor) picture.append(svg("line", { x1: x(Math.log2(cursor)), x2: x(Math.log2(cursor)), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, class: "cursor" }));
  const names = [];
  for (const { name, colour, points } of series) {
    const at = ([px, value]) => `${x(Math.log2(px)).toFixed(1)},${y(value).toFixed(1)}`;
    const upper = points.map(([px, , , top]) => at([px, top]));
    const lower = points.map(([px, , bottom]) => at([px, bottom])).reverse();
    picture.append(
      svg("g", { "clip-path": `url(#${clip})` },
        svg("polygon", { points: [...upper, ...lower].join(" "), fill: colour, opacity: 0.16 }),
        svg("polyline", { points: points.map(at).join(" "), fill: "none", stroke: colour, "stroke-width": 2.25, "stroke-linejoin": "round" }),
        ...points.filter(([, , , , tried]) => tried).map(([px, value]) => svg("circle", { cx: x(Math.log2(px)), cy: y(value), r: 3, fill: colour })),
      ),
    );
    if (points.length) names.push({ name, colour, y: y(points.at(-1)[1]) + 4 });
  }
  for (const { name, colour, y: place } of apart(names, 14)) {
    picture.append(svg("text", { x: width - MARGIN.right + 8, y: place, class: "name", fill: colour, style: null }, name));
    picture.lastChild.style.fill = colour;
  }
  if (onPick) {
    picture.addEventListener("click", (event) => {
      const there = (event.offsetX / picture.clientWidth) * width;
      onPick(xs.reduce((best, one) => (Math.abs(x(Math.log2(one)) - there) < Math.abs(x(Math.log2(best)) - there) ? one : best)));
    });
  }
  return picture;
}

// A value with an interval at each position: {points: [[value, low, high, samples], …], colour, label}
export function positions({ points, colour, label }, width) {
  if (!points.length) return empty("This policy does not learn how many drafts are accepted.");
  const x = scale(0.5, points.length + 0.5, MARGIN.left, width - 14);
  const y = scale(0, 1, HEIGHT - MARGIN.bottom, MARGIN.top);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": label });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    picture.append(
      svg("line", { x1: MARGIN.left, x2: width - 14, y1: y(tick), y2: y(tick), class: "grid" }),
      svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, `${100 * tick} %`),
    );
  }
  picture.append(svg("polyline", { points: points.map(([value], i) => `${x(i + 1)},${y(value)}`).join(" "), fill: "none", stroke: colour, "stroke-width": 2, opacity: 0.35 }));
  points.forEach(([value, low, high, samples], i) => {
    const at = x(i + 1);
    picture.append(
      svg("line", { x1: at, x2: at, y1: y(low), y2: y(high), stroke: colour, "stroke-width": 8, opacity: 0.3, "stroke-linecap": "round" }),
      svg("circle", { cx: at, cy: y(value), r: 4.5, fill: samples >= 1 ? colour : "none", stroke: colour, "stroke-width": 2 }),
      svg("text", { x: at, y: y(high) - 9, "text-anchor": "middle" }, `${Math.round(100 * value)} %`),
      svg("text", { x: at, y: HEIGHT - MARGIN.bottom + 15, "text-anchor": "middle" }, String(i + 1)),
    );
  });
  picture.append(svg("text", { x: (MARGIN.left + width - 14) / 2, y: HEIGHT - 2, "text-anchor": "middle" }, "draft position"));
  return picture;
}

// Shares of K over time, and two curves below: {hour: HourView, candidates, colour: k => …, label}
export function hour({ hour, colours, label }, width) {
  if (!hour.ages.length) return empty("No decode step in the last hour.");
  const panels = { share: [6, 110], batch: [128, 184], tokens: [202, 258] };
  const total = 282;
  const span = Math.min(Math.max(hour.ages[0], 120), 3600);
  const right = width - 14;
  const x = scale(-span, 0, MARGIN.left, right);
  const thick = Math.max(x(hour.span_seconds) - x(0) + 0.6, 1);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${total}`, height: total, role: "img", "aria-label": label });
  picture.append(svg("text", { x: MARGIN.left - 6, y: panels.share[0] + 10, "text-anchor": "end" }, "100 %"));
  hour.ages.forEach((age, i) => {
    if (age > span + hour.span_seconds) return;
    const counts = Object.entries(hour.steps[i]).map(([k, n]) => [Number(k), n]).sort((a, b) => a[0] - b[0]);
    const sum = counts.reduce((all, [, n]) => all + n, 0);
    const left = Math.max(x(-age), MARGIN.left);
    const until = Math.min(left + thick, right);
    let top = panels.share[1];
    for (const [k, n] of counts) {
      const height = ((panels.share[1] - panels.share[0]) * n) / sum;
      top -= height;
      picture.append(svg("rect", { x: left, y: top, width: Math.max(until - left, 0.5), height, fill: colours[k] ?? "gray" }));
    }
  });
  curve(picture, hour, hour.batch_sizes, "batch", panels.batch, x, right);
  curve(picture, hour, hour.tokens_per_second, "tok/s", panels.tokens, x, right);
  const minutes = span / 60;
  const step = [0.5, 1, 2, 5, 10, 15].find((one) => minutes / one <= width / 110) ?? 15;
  for (let ago = 0; ago <= minutes + 1e-9; ago += step) {
    const anchor = ago === 0 ? "end" : "middle";
    picture.append(svg("text", { x: ago === 0 ? right : x(-60 * ago), y: total - 4, "text-anchor": anchor }, ago === 0 ? "now" : `−${ago} min`));
  }
  return picture;
}

function curve(picture, hour, values, name, [top, bottom], x, right) {
  const most = Math.max(...values, 1);
  const y = scale(0, most * 1.05, bottom, top);
  const short = most >= 1e3 ? `${(most / 1e3).toFixed(1)}k` : String(Math.round(most));
  picture.append(
    svg("line", { x1: MARGIN.left, x2: right, y1: bottom, y2: bottom, class: "grid" }),
    svg("text", { x: MARGIN.left - 6, y: top + 9, "text-anchor": "end" }, short),
    svg("text", { x: MARGIN.left - 6, y: bottom, "text-anchor": "end" }, name),
  );
  // A gap in time is a gap in the curve: nothing was decoded.
  let run = [];
  const flush = () => {
    if (run.length) {
      const points = run.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ");
      picture.append(
        svg("polygon", { points: `${run[0][0]},${bottom} ${points} ${run.at(-1)[0]},${bottom}`, class: "area" }),
        svg("polyline", { points, class: "trace" }),
      );
    }
    run = [];
  };
  hour.ages.forEach((age, i) => {
    if (i && hour.ages[i - 1] - age > 1.5 * hour.span_seconds) flush();
    const until = Math.max(age - hour.span_seconds, 0);
    run.push([Math.max(x(-age), MARGIN.left), y(values[i])], [Math.min(x(-until), right), y(values[i])]);
  });
  flush();
}

function scale(from, to, first, last) {
  const span = to - from || 1;
  return (value) => first + ((value - from) / span) * (last - first);
}

function round_ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= rough);
  const ticks = [];
  for (let n = Math.floor(low / step); n * step <= high + 1e-12; n++) ticks.push(n * step);
  return ticks;
}

// Moves labels apart vertically, so that each can be read.
function apart(names, gap) {
  const sorted = [...names].sort((a, b) => a.y - b.y);
  for (let i = 1; i < sorted.length; i++) sorted[i].y = Math.max(sorted[i].y, sorted[i - 1].y + gap);
  const over = Math.max(0, (sorted.at(-1)?.y ?? 0) - (HEIGHT - MARGIN.bottom + 4));
  return sorted.map((one) => ({ ...one, y: one.y - over }));
}
