// Asks the controller at least twice a second what it knows, and shows it. Nothing is computed here but places on a screen.
import { chart, hour as drawHour, lines, positions } from "./charts.js";
import { colour, paint, whenThemeChanges } from "./colours.js";
import { HeatMap } from "./heatmap.js";
import { batchName, contextName, html, ms, percent, say, signed, whole } from "./text.js";

const VIEW_MS = 420;
const HOUR_MS = 5000;
const $ = (id) => document.getElementById(id);
const state = { view: null, hour: null, server: new URLSearchParams(location.hash.slice(1)).get("server") ?? "", cell: null, follow: true, failedAt: 0 };

// -- asking --

async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (response.status === 401) location.reload();
  if (!response.ok) throw new Error((await response.text()).trim());
  return response.json();
}

async function every(milliseconds, work) {
  for (;;) {
    const begun = performance.now();
    if (!document.hidden) await work();
    await new Promise((wake) => setTimeout(wake, Math.max(milliseconds - (performance.now() - begun), 50)));
  }
}

async function readView() {
  try {
    state.view = await ask(`/api/view?server=${encodeURIComponent(state.server)}`);
    state.failedAt = 0;
    document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates ?? 0) + 1;
    show();
  } catch (error) {
    state.failedAt ||= performance.now();
  }
  showLink();
}

async function readHour() {
  const name = state.view?.server?.name;
  if (!name) return;
  try {
    state.hour = { name, ...(await ask(`/api/hour?server=${encodeURIComponent(name)}`)) };
    showHour();
  } catch (error) {
    state.failedAt ||= performance.now();
  }
}

// -- showing --

function showLink() {
  const lost = state.failedAt > 0;
  $("link").className = lost ? "lost" : "live";
  say($("link"), lost ? `no answer from the controller for ${Math.round((performance.now() - state.failedAt) / 1000)} s` : "live");
}

function show() {
  const { view } = state;
  showServers(view);
  showProblems(view);
  say($("footer"), `Specpilot ${view.version} · policy ${view.policy} · up ${view.uptime} · ${view.endpoint} · trace: ${view.trace}`);
  if (!view.server) return;
  const server = view.server;
  if (state.follow || state.cell === null || state.cell >= server.cells.length) state.cell = server.busiest >= 0 ? server.busiest : likely(server);
  showVerdict(server);
  map.update(server, state.cell);
  showLegend(server);
  showWhy(server);
  showCharts(server);
}

// With nothing running: the cell of batch 8, where speculation usually is worth a look.
function likely(server) {
  const row = server.batch_sizes.findIndex((size) => size >= 8);
  return Math.max(row, 0) * server.contexts.length;
}

function showServers(view) {
  const names = view.servers.map((one) => one.name);
  const select = $("server");
  if (select.options.length !== names.length || names.some((name, i) => select.options[i].value !== name)) {
    select.replaceChildren(...names.map((name) => html("option", { value: name }, name)));
  }
  view.servers.forEach((one, i) => say(select.options[i], one.severity ? `${one.name} (${one.severity === "bad" ? "needs a look" : "note"})` : one.name));
  if (view.server) {
    select.value = view.server.name;
    document.title = `${view.server.name} · Specpilot`;
  }
  select.disabled = names.length < 2;
  $("all").hidden = names.length < 2;
  const rows = view.servers.map((one) => {
    const link = html("a", { href: `#server=${encodeURIComponent(one.name)}` }, one.name);
    const health = one.severity === "bad" ? "needs a look" : one.severity === "warn" ? "note" : "well";
    return html("tr", {}, html("th", { scope: "row" }, link), html("td", {}, `K=${one.steps}`), html("td", {}, whole(one.tokens_per_second)),
      html("td", {}, one.gain ? signed(one.gain[0]) : "–"), html("td", {}, health));
  });
  refill($("servers"), rows);
}

function showVerdict(server) {
  const verdict = judged(server);
  $("verdict").classList.toggle("gaining", verdict.sure > 0);
  $("verdict").classList.toggle("costing", verdict.sure < 0);
  say($("gain-word"), verdict.word);
  say($("gain"), verdict.share === undefined ? "" : percent(Math.abs(verdict.share)));
  const ends = (verdict.ends ?? []).map((end) => (verdict.share < 0 ? -end : end)).sort((a, b) => a - b);
  say($("gain-interval"), ends.length ? `${percent(ends[0]).replace(" %", "")} to ${percent(ends[1])}` : "");
  say($("gain-note"), verdict.note);
  say($("measured"), server.measured ? `Measured: ${server.measured}` : "");
  say($("k-now"), String(server.steps));
  say($("tokens-now"), whole(server.tokens_per_second));
  say($("batch-now"), server.batch_size < 10 ? server.batch_size.toFixed(1).replace(/\.0$/, "") : whole(server.batch_size));
  const shares = Object.entries(server.share_by_steps).map(([k, part]) => [Number(k), part]);
  const said = shares.map(([k, part]) => `K=${k} ${percent(part)}`).join(", ");
  refill($("share"), shares.map(([k, part]) => {
    const piece = html("span", {}, part > 0.22 ? `K=${k} ${percent(part)}` : part > 0.1 ? `K=${k}` : "");
    paint(piece, k, server.candidate_steps);
    piece.style.width = `${100 * part}%`;
    piece.style.background = "var(--fill)";
    piece.style.color = "var(--text)";
    return piece;
  }));
  $("share").setAttribute("aria-label", `of the newest 512 steps: ${said || "none yet"}`);
  say($("decides"), `of the newest 512 steps · decided by ${server.decides} · ${server.table}`);
}

// What speculation gains in the newest steps; where it is off, what it would cost instead.
function judged(server) {
  const estimated = "tokens a second of decoding, against none (K=0), estimated from the newest 256 steps";
  if (!server.gain) return { word: "What speculation gains is not known", note: unknown(server) };
  const [share, low, high] = server.gain;
  const rounded = Math.round(100 * share);
  if (rounded) {
    const sure = rounded > 0 && low > 0 ? 1 : rounded < 0 && high < 0 ? -1 : 0;
    return { word: rounded > 0 ? "Speculation is gaining" : "Speculation is costing", share, ends: [low, high], sure, note: estimated };
  }
  const now = server.cells[server.busiest];
  const best = now?.options.filter(([k]) => k > 0).sort((a, b) => b[3] - a[3])[0];
  if (now?.steps === 0 && best && best[4][0] < 0) {
    return { word: "Speculation is off: it would cost", share: best[4][0], ends: best[4].slice(1), note: `tokens a second of decoding, at the present load, with K=${best[0]}` };
  }
  return { word: "Speculation neither gains nor costs", note: estimated };
}

const unknown = (server) =>
  server.positions.length ? "no decode step was seen yet" : `policy ${server.policy || "none"} does not estimate it: policy goodput does, and a switchback measures it`;

function showProblems(view) {
  const all = [...view.problems, ...(view.server?.problems ?? [])];
  const items = all.map((one) => html("li", { class: one.severity }, one.text));
  refill($("problems"), items.length ? items : [html("li", { class: "good" }, "Nothing to look at: no drops, no fallbacks, all ranks agree.")]);
}

function showLegend(server) {
  const chips = server.candidate_steps.map((k) => {
    const mark = html("i");
    paint(mark, k, server.candidate_steps);
    return html("span", {}, mark, k === 0 ? "K=0, no speculation" : `K=${k}`);
  });
  if (server.cells.some((cell) => cell.options.length)) {
    const pale = html("i", { class: "predicted" });
    paint(pale, server.candidate_steps.at(-1), server.candidate_steps);
    chips.push(html("span", {}, pale, "pale: predicted, not run there yet"), html("span", {}, html("i", { class: "dot" }), "steps run here now"));
  }
  refill($("legend"), chips);
}

function showWhy(server) {
  const cell = server.cells[state.cell];
  const columns = server.contexts.length;
  const context = contextName(server.contexts[state.cell % columns]);
  say($("why-title"), `Why K=${cell.steps} at batch ${batchName(server.batches[Math.floor(state.cell / columns)])}, ${context === "any context" ? context : `${context} tokens`}`);
  say($("why-text"), cell.why);
  $("follow").setAttribute("aria-pressed", String(state.follow));
  say($("why-against"), `against K=${cell.steps}`);
  const most = Math.max(...cell.options.map((option) => option[3]));
  const rows = cell.options.map(([k, tokens, seconds, rate, against, , tried, allowed]) => {
    const chip = html("span", { class: "chip" }, String(k));
    const bar = html("div", { class: "bar" });
    for (const element of [chip, bar]) paint(element, k, server.candidate_steps);
    bar.style.width = `${(100 * rate) / most}%`;
    const chosen = k === cell.steps;
    const notes = [chosen ? html("small", { class: "tag" }, "chosen") : "", tried ? "" : html("small", {}, "predicted"), allowed ? "" : html("small", {}, "too slow")];
    const best = chosen ? "–" : signed(against[0]);
    return html("tr", chosen ? { class: "chosen" } : {},
      html("td", {}, chip, ...notes),
      html("td", {}, tokens[0].toFixed(2), html("small", {}, range(tokens, (one) => one.toFixed(2)))),
      html("td", {}, ms(seconds[0]), html("small", {}, range(seconds, (one) => (1e3 * one).toFixed(one < 0.1 ? 1 : 0)))),
      html("td", {}, whole(rate), bar),
      html("td", {}, best, chosen ? "" : html("small", {}, range(against, (one) => percent(one).replace(" %", "")))));
  });
  $("why-table").hidden = !rows.length;
  refill($("why-table").tBodies[0], rows);
}

const range = ([, low, high], format) => (format(low) === format(high) ? "" : `${format(low)} … ${format(high)}`);

function showCharts(server) {
  const columns = server.contexts.length;
  const column = state.cell % columns;
  const rows = server.batch_sizes.map((size, row) => [size, server.cells[row * columns + column].options]);
  const curves = (pick) => server.candidate_steps.map((k, arm) => ({
    name: `K=${k}`,
    colour: colour(k, server.candidate_steps),
    points: rows.filter(([, options]) => options.length && pick(options[arm])).map(([size, options]) => [size, ...pick(options[arm]), options[arm][6]]),
  })).filter((one) => one.points.length);
  const row = Math.floor(state.cell / columns);
  const cursor = server.batch_sizes[row];
  const here = server.cells[state.cell].options;
  const say_here = (text) => `At batch ${server.batches[row]}: ${here.map(text).join(", ") || "nothing learned yet"}`;
  gainChart.update({ series: curves((option) => option[5]), cursor, label: say_here((o) => `K=${o[0]} ${o[5] ? signed(o[5][0]) : "unknown"}`) });
  costChart.update({ series: curves((option) => option[2]), cursor, label: say_here((o) => `K=${o[0]} ${ms(o[2][0])}`) });
  const points = server.positions.map((one) => [...one.acceptance, one.samples]);
  acceptanceChart.update({
    points,
    colour: colour(server.candidate_steps.at(-1), server.candidate_steps),
    label: `Accepted drafts by position: ${points.map(([value], i) => `${i + 1}: ${percent(value)}`).join(", ") || "not learned"}`,
  });
}

function showHour() {
  const server = state.view?.server;
  if (!server || state.hour?.name !== server.name) return;
  const seen = state.hour.steps.flatMap((counts) => Object.keys(counts).map(Number));
  const colours = Object.fromEntries([...server.candidate_steps, ...seen].map((k) => [k, colour(k, server.candidate_steps)]));
  const steps = state.hour.steps.reduce((all, counts) => all + Object.values(counts).reduce((sum, n) => sum + n, 0), 0);
  hourChart.update({ hour: state.hour, colours, label: `${whole(steps)} decode steps in the last hour by K, with batch size and tokens a second` });
}

// Replaces the children where anything differs.
function refill(element, children) {
  const now = [...element.childNodes];
  if (now.length === children.length && now.every((one, i) => one.isEqualNode(children[i]))) return;
  element.replaceChildren(...children);
}

// -- what a person does --

function choose(cell) {
  state.follow = false;
  state.cell = cell;
  show();
}

function pick(batchSize) {
  const { server } = state.view;
  choose(server.batch_sizes.indexOf(batchSize) * server.contexts.length + (state.cell % server.contexts.length));
}

function look(name) {
  if (name === state.server) return;
  Object.assign(state, { server: name, cell: null, follow: true });
  readView().then(readHour);
}

const map = new HeatMap($("heat"), choose, () => state.view && show());
const gainChart = chart($("gain-chart"), (data, width) => lines({ ...data, format: (value) => signed(value), zero: true, onPick: pick }, width));
const costChart = chart($("cost-chart"), (data, width) => lines({ ...data, format: (value) => `${Number((1e3 * value).toPrecision(3))} ms`, onPick: pick }, width));
const acceptanceChart = chart($("acceptance-chart"), positions);
const hourChart = chart($("hour-chart"), drawHour);

$("server").addEventListener("change", (event) => (location.hash = `server=${encodeURIComponent(event.target.value)}`));
addEventListener("hashchange", () => look(new URLSearchParams(location.hash.slice(1)).get("server") ?? ""));
$("follow").addEventListener("click", () => {
  state.follow = !state.follow;
  show();
});
whenThemeChanges(() => {
  if (state.view) show();
  showHour();
});

await readView();
every(VIEW_MS, readView);
every(HOUR_MS, readHour);
