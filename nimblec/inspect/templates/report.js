// Draws the facts of nimblec/inspect/report.py; their text reaches the page through text nodes and canvases alone.
const facts = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const HUES = [212, 28, 145, 275, 0, 182, 48, 325, 95, 245];

// --- text

const count = (n) => n.toLocaleString("en-US");
const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
const share = (part) => `${(100 * part).toFixed(1)}%`;
const total = (numbers) => numbers.reduce((sum, n) => sum + n, 0);
const joined = (object, text) => Object.entries(object).map(([key, value]) => text(key, value)).join(", ");
const type = (tensor) => `${tensor.dtype} ${tensor.shape.join("x") || "scalar"}${tensor.is_bound ? " at most" : ""}`;

function bytes(n) {
  let unit = 0;
  for (; n >= 999.95 && unit < 4; unit++) n /= 1000;
  return `${unit ? n.toFixed(1) : n} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

/** A duration to three digits, or as precise as `step`; where none was measured, in commands. */
function time(ns, step = null) {
  const units = program.measured ? [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]] : [[1e3, "steps"]];
  const [scale, unit] = units.find(([least]) => ns >= least) ?? units.at(-1);
  const digits = step ? -Math.log10(step / scale) : scale === 1 ? 0 : 2 - Math.log10(Math.max(1, ns / scale));
  const text = (ns / scale).toFixed(Math.max(0, Math.min(6, Math.ceil(digits - 1e-9))));
  return `${program.measured ? text : +text} ${unit}`;
}

// --- nodes and tables

function element(tag, attributes, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

function list(rows) {
  const given = rows.filter(([, value]) => (value ?? "") !== "");
  const pair = ([key, value]) => [element("dt", {}, key), element("dd", {}, String(value))];
  return element("dl", {}, ...given.flatMap(pair));
}

/** A column of text; `style` names a class, `width` is in pixels where it is fixed. */
const column = (title, value, style = "", width = null) => ({ title, value, text: value, style, width });

/** A column of numbers; `bar(row)` is the length of a bar from 0 to 1. */
const numbers = (title, value, text = count, bar = null, width = 92) =>
  ({ title, value, text: (row) => (value(row) === null ? "" : text(value(row))), bar, style: "right", width });

/**
 * A table whose columns sort; more rows are drawn as it scrolls. `find(words)` shows the rows that have all of them and
 * returns their number. A row with a `heading` is one cell, shown while all rows are there in their own order.
 */
function makeTable(columns, rows, click = null) {
  const texts = new Map(rows.map((row) => [row, row.heading ? "" : columns.map(({ text }) => text(row)).join(" ")]));
  const drawn = new Map(), body = element("tbody"), node = element("div", { className: "scroll" });
  let order = null, sign = 1, wanted = [], shown = [], selected = null;

  function line(row) {
    if (row.heading) return element("tr", {}, element("td", { colSpan: columns.length }, row.heading));
    const cells = columns.map(({ text, bar, style: className }) => {
      const shown = String(text(row));
      const made = element("td", { className, title: shown.length > 14 ? shown : "" });
      made.append(element("div", {}, element("bdi", {}, shown)));
      if (bar) made.style.backgroundSize = `${100 * Math.min(1, bar(row))}% 100%`;
      return made;
    });
    const className = (click ? "link" : "") + (row === selected ? " selected" : "");
    const made = element("tr", { className, onclick: () => click?.(row) }, ...cells);
    drawn.set(row, made);
    return made;
  }

  const drawMore = () => body.append(...shown.slice(body.childElementCount).slice(0, 150).map(line));

  function draw() {
    const has = (row) => wanted.every((word) => texts.get(row).toLowerCase().includes(word) || row.words?.includes(word));
    shown = rows.filter((row) => (row.heading ? !order && !wanted.length : has(row)));
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? -1) - (b ?? -1));
    if (order) shown.sort((a, b) => sign * compare(order.value(a), order.value(b)));
    drawn.clear();
    body.replaceChildren();
    node.scrollTop = 0;
    drawMore();
    return shown.filter((row) => !row.heading).length;
  }

  function sort(by) {
    const first = by.style === "right" ? -1 : 1;
    if (order === by) [order, sign] = [sign === first ? by : null, -first];
    else [order, sign] = [by, first];
    const direction = sign > 0 ? "ascending" : "descending";
    heads.forEach((head, index) => (head.ariaSort = columns[index] === order ? direction : "none"));
    draw();
  }

  const heads = columns.map((each) => {
    const head = element("th", { ariaSort: "none", className: each.style, title: each.hint ?? "" }, each.title);
    if (each.width) head.style.width = `${each.width}px`;
    head.onclick = () => sort(each);
    return head;
  });
  draw();
  node.append(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
  node.onscroll = () => node.scrollTop + 2 * node.clientHeight > node.scrollHeight && drawMore();
  return {
    node,
    find: (words) => ((wanted = words), draw()),
    select(row) {
      drawn.get(selected)?.classList.remove("selected");
      selected = row;
      while (row && shown.includes(row) && !drawn.has(row)) drawMore();
      drawn.get(row)?.classList.add("selected");
      const y = drawn.get(row)?.offsetTop - node.scrollTop;
      if (y < 40 || y > node.clientHeight - 40) node.scrollTop += y - 120;
    },
  };
}

// --- the program that is shown: its commands, and below those that run bodies the commands of these

let program, rows, items, top, rowCount, streamRows, view, lives, live, peak, colours = new Map(), tables = {};
let selected = null, hovered = null, matches = null;

/** The rows that each stream takes: one, and below it those of the bodies that its commands run. */
function rowsOf({ streams, work }) {
  const found = Array(streams).fill(1);
  for (const { stream, run } of work) {
    const below = total(run.map((body) => total(rowsOf(facts.bodies[body]))));
    found[stream] = Math.max(found[stream], 1 + below);
  }
  return found;
}

/** The first row of each stream. */
const starts = (found) => found.map((_, stream) => total(found.slice(0, stream)));

/** Add the commands of a program, whose time is scaled; one run of a body fills the time of the command that runs it. */
function place(of, name, start, scale, row, depth) {
  const first = starts(rowsOf(of));
  for (const work of of.work) {
    const kernel = facts.kernels[work.kernel], duration = work.end - work.start;
    const item = {
      ...work, depth, duration, kernel, number: work.kernel, id: name + work.command, row: row + first[work.stream],
      start: start + scale * work.start, end: start + scale * work.end, share: depth ? null : duration / of.busy,
      origin: kernel?.origin ?? work.type, label: kernel?.symbol ?? `${work.type} of ${bytes(work.touched)}`,
      used: work.floor && work.measured_ns ? work.floor / duration : null,
    };
    item.words = [item.kind, item.nodes?.flat().join(" "), item.critical ? "critical" : ""].join(" ").toLowerCase();
    item.text = [item.id, item.op, item.source, item.label, item.origin, item.words].join(" ").toLowerCase();
    rows.push(item);
    let below = item.row + 1;
    work.run.forEach((body, choice) => {
      const inner = facts.bodies[body];
      const why = work.type === "while" ? `while ${work.condition} is true` : `where ${work.index} is ${choice}`;
      const indented = `${"\u2003".repeat(depth + 1)}↳ ${inner.name}: `;
      rows.push({ heading: `${indented}${plural(inner.work.length, "command")} that ${item.id} runs ${why}` });
      const prefix = work.run.length > 1 ? `${item.id}.${choice}.` : `${item.id}.`;
      place(inner, prefix, item.start, (item.end - item.start) / (inner.duration || 1), below, depth + 1);
      below += total(rowsOf(inner));
    });
  }
}

const colourKey = () => ($("colour").value === "origin" ? "origin" : "kind");

function recolour() {
  const spent = new Map(items.map((item) => [item[colourKey()], 0]));
  for (const item of top) spent.set(item[colourKey()], spent.get(item[colourKey()]) + item.duration);
  const ranked = [...spent].sort((a, b) => b[1] - a[1]);
  const shades = dark.matches ? ["45% 36%", "hsl(215 8% 36%)"] : ["70% 80%", "hsl(215 10% 82%)"];
  colours = new Map(ranked.map(([name], i) => [name, i < HUES.length ? `hsl(${HUES[i]} ${shades[0]})` : shades[1]]));
  $("legend").replaceChildren(...ranked.slice(0, HUES.length).map(([name, ns]) => {
    const text = `${name} ${share(ns / (program.busy || 1))}`;
    const chip = element("button", { title: "search for it", onclick: () => search(name) }, text);
    chip.style.background = colours.get(name);
    return chip;
  }));
  redraw();
}

/** The live ranges of the arena as boxes, and the number of live bytes after each change. */
function measureMemory() {
  lives = program.lives.map(([offset, nbytes, first, last]) => ({ offset, nbytes, first: top[first], last: top[last] }));
  const changes = lives.flatMap((life) => [[life.first.start, life.nbytes], [life.last.end, -life.nbytes]]);
  let now = 0;
  changes.sort((a, b) => a[0] - b[0]);
  live = changes.map(([at, change]) => [at, (now += change)]).filter(([at], i) => at !== changes[i + 1]?.[0]);
  peak = live.reduce((most, [, nbytes]) => Math.max(most, nbytes), 0);
  const arena = program.regions.arena;
  $("memory").hidden = !arena;
  $("peak").textContent = !arena ? "this program has no arena"
    : `arena of ${bytes(arena)}, of which at most ${bytes(peak)} (${share(peak / arena)}) are live at a time; ` +
      "below the curve each value at its offset, in the colour of the command that writes it";
}

// --- canvases: streams and memory share the time axis

const GUTTER = 76, AXIS = 20, CURVE = 60, RANGES = 200;
const rowHeight = () => Math.max(7, Math.min(26, 520 / rowCount));

let pending = false;
function redraw() {
  if (!pending) requestAnimationFrame(() => ((pending = false), drawStreams(), drawMemory()));
  pending = true;
}

/** Size a canvas, draw the axis, and call `draw` for what is right of the gutter. */
function drawArea(canvas, height, draw) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
  Object.assign(canvas, { width: width * scale, height: height * scale }).style.height = `${height}px`;
  pen.scale(scale, scale);
  Object.assign(pen, { font: "11px system-ui, sans-serif", textBaseline: "middle" });
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`);
  const x = (ns) => GUTTER + ((ns - view[0]) / span()) * (width - GUTTER);
  const box = (left, right, y, tall, fill) => {
    pen.fillStyle = fill;
    const from = Math.max(left, GUTTER - 3), wide = Math.max(1, Math.min(right, width + 3) - from);
    pen.fillRect(from, y, wide, tall);
    return [from, wide];
  };
  const outline = (place, strokeStyle, lineWidth) => Object.assign(pen, { strokeStyle, lineWidth }).strokeRect(...place);
  const label = (text, left, y, room = Infinity) => {
    const fits = pen.measureText(text).width <= room, letters = Math.floor(room / 6.2) - 1;
    pen.fillStyle = colour(room === Infinity ? "muted" : "text");
    if (fits || letters > 2) pen.fillText(fits ? text : `${text.slice(0, letters)}…`, left, y);
  };
  const area = { pen, width, colour, x, box, outline, label, isSeen: (a, b) => x(b) >= GUTTER && x(a) <= width };
  draw.gutter(area);
  pen.beginPath();
  pen.rect(GUTTER, 0, width, height);
  pen.clip();
  const rough = (span() / (width - GUTTER)) * 110, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1]; tick += step) {
    box(x(tick), x(tick) + 1, 0, height, colour("line"));
    if (x(tick) < width - 60) label(time(tick, step), x(tick) + 4, AXIS / 2);
  }
  draw.rest(area);
}

function drawStreams() {
  const tall = rowHeight(), every = Math.ceil(12 / tall);
  drawArea($("streams"), AXIS + rowCount * tall + 4, {
    gutter: ({ label }) => streamRows.forEach((row, stream) => {
      if (stream % every === 0) label(`stream ${stream}`, 8, AXIS + (row + 0.5) * tall);
    }),
    rest(area) {
      for (const item of items) if (area.isSeen(item.start, item.end)) drawCommand(area, item, tall);
      drawWaits(area, tall);
    },
  });
}

function drawCommand({ pen, colour, x, box, outline, label }, item, tall) {
  const y = AXIS + item.row * tall, left = x(item.start), right = x(item.end), gap = right - left > 3 ? 1 : 0;
  pen.globalAlpha = matches && !matches.has(item) ? 0.18 : 1;
  const [from, wide] = box(left, right - gap, y + 2, tall - 4, colours.get(item[colourKey()]));
  if (item.critical) box(left, right - gap, y + tall - 4, 2, colour("critical"));
  if (item === selected || item === hovered) {
    outline([from, y + 2, Math.max(2, wide), tall - 4], colour(item === selected ? "accent" : "text"), 2);
  }
  const text = wide > 150 ? `${item.kind}  ${item.source}` : item.kind;
  if (tall > 13 && wide > 26) label(text, from + 4, y + tall / 2, wide - 8);
  pen.globalAlpha = 1;
}

/** Waits between streams as curves: those of the selected command, and all in view if these are few. */
function drawWaits({ pen, colour, x, isSeen }, tall) {
  const near = program.handovers.map(([, a, b]) => [top[a], top[b]]).filter(([a, b]) => isSeen(a.end, b.start));
  for (const [source, target] of near) {
    const own = source === selected || target === selected;
    if (!own && (near.length > 60 || selected)) continue;
    const from = x(source.end), to = x(target.start);
    const [y, end] = [source, target].map(({ row }) => AXIS + (row + 0.5) * tall);
    const bend = Math.max(8, Math.min(40, (to - from) / 2));
    Object.assign(pen, { strokeStyle: colour(own ? "accent" : "muted"), lineWidth: own ? 2 : 1 });
    pen.beginPath();
    pen.moveTo(from, y);
    pen.bezierCurveTo(from + bend, y, to - bend, end, to, end);
    pen.stroke();
  }
}

function boxOf(life) {
  const scale = RANGES / program.regions.arena;
  return [AXIS + CURVE + 8 + life.offset * scale, Math.max(1, life.nbytes * scale)];
}

function drawMemory() {
  const base = AXIS + CURVE;
  if ($("memory").hidden) return;
  drawArea($("memory"), base + RANGES + 14, {
    gutter({ label }) {
      const ends = [["offset 0", base + 14], [bytes(program.regions.arena), base + RANGES + 2]];
      for (const [text, y] of [[bytes(peak), AXIS + 6], ["live", base - 8], ...ends]) label(text, 8, y);
    },
    rest(area) {
      const { pen, colour, x } = area;
      let y = base;
      pen.beginPath();
      pen.moveTo(x(0), y);
      for (const [at, nbytes] of live) {
        pen.lineTo(x(at), y);
        pen.lineTo(x(at), (y = base - (nbytes / (peak || 1)) * (CURVE - 4)));
      }
      Object.assign(pen, { fillStyle: colour("bar"), strokeStyle: colour("accent"), lineWidth: 1 });
      pen.fill();
      pen.stroke();
      for (const life of lives) if (area.isSeen(life.first.start, life.last.end)) drawLife(area, life);
    },
  });
}

function drawLife({ pen, colour, x, box, outline, label }, life) {
  const [y, tall] = boxOf(life), own = selected && (life.first === selected || life.last === selected);
  pen.globalAlpha = matches && !matches.has(life.first) && !matches.has(life.last) ? 0.18 : 1;
  const [from, wide] = box(x(life.first.start), x(life.last.end), y, tall, colours.get(life.first[colourKey()]));
  if (own || life === hovered) outline([from, y, wide, tall], colour(own ? "accent" : "text"), 2);
  else if (tall > 4 && wide > 4) outline([from, y, wide, tall], colour("page"), 0.5);
  const text = `${bytes(life.nbytes)}  ${life.first.source || life.first.kind}`;
  if (tall > 12 && wide > 40) label(text, from + 4, y + tall / 2, wide - 8);
  pen.globalAlpha = 1;
}

// --- looking around

function show(start, width) {
  const wide = Math.max(Math.min(program.duration, width), Math.min(program.duration, 50), 1);
  const from = Math.max(0, Math.min(program.duration - wide, start));
  view = [from, from + wide];
  redraw();
}

const span = () => view[1] - view[0];
const pan = (part) => show(view[0] + part * span(), span());

function zoom(factor, at = (view[0] + view[1]) / 2) {
  const by = Math.max(factor, Math.min(50, program.duration) / span());
  show(at - (at - view[0]) * by, span() * by);
}

const timeAt = (canvas, x) => view[0] + ((x - GUTTER) / (canvas.clientWidth - GUTTER)) * span();

/** The command or live range below the pointer. */
function find(canvas, { offsetX, offsetY }) {
  const at = timeAt(canvas, offsetX), slack = span() / canvas.clientWidth;
  const isAt = (start, end) => at >= view[0] && start - slack <= at && at <= end + slack;
  const isIn = ([y, tall]) => y <= offsetY && offsetY <= y + tall;
  if (canvas === $("memory")) return lives.find((life) => isAt(life.first.start, life.last.end) && isIn(boxOf(life)));
  const row = Math.floor((offsetY - AXIS) / rowHeight());
  return items.find((item) => item.row === row && isAt(item.start, item.end));
}

function tip(found, event) {
  const use = (item) => `${item.id}: ${item.kind} ${item.source}`;
  if (($("tip").hidden = !found)) return;
  const lines = found.first
    ? [`${bytes(found.nbytes)} at ${count(found.offset)}`, `from ${use(found.first)}`, `until ${use(found.last)}`]
    : [`${found.id}: ${found.kind}  ${time(found.duration)}`, found.source, found.label.slice(0, 200)];
  $("tip").textContent = lines.filter(Boolean).join("\n");
  $("tip").style.left = `${Math.min(event.clientX + 14, innerWidth - $("tip").offsetWidth - 8)}px`;
  $("tip").style.top = `${Math.min(event.clientY + 16, innerHeight - $("tip").offsetHeight - 8)}px`;
}

function watch(canvas) {
  let from = null, moved = false;
  canvas.onpointerdown = (event) => {
    [from, moved] = [{ x: event.offsetX, view }, false];
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    moved ||= from && Math.abs(event.offsetX - from.x) > 3;
    if (from && moved) show(from.view[0] - ((event.offsetX - from.x) / (canvas.clientWidth - GUTTER)) * span(), span());
    hovered = from && moved ? null : find(canvas, event);
    tip(hovered, event);
    redraw();
  };
  canvas.onpointerup = (event) => {
    const found = find(canvas, event);
    from = null;
    if (!moved) select(found?.first ?? found);
  };
  canvas.onpointerleave = () => {
    tip((hovered = null));
    redraw();
  };
  canvas.onwheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    zoom(1.0015 ** event.deltaY, timeAt(canvas, event.offsetX));
    event.preventDefault();
  };
}

/** Mark a command everywhere, describe it at the bottom, and bring it into view. */
function select(item) {
  selected = item ?? null;
  $("detail").hidden = !item;
  document.body.classList.toggle("open", Boolean(item));
  if (item) {
    const wide = Math.min(span(), Math.max((item.end - item.start) * 20, program.duration / 2000));
    if (item.end < view[0] || item.start > view[1]) show((item.start + item.end - wide) / 2, wide);
    $("detail").replaceChildren(...details(item));
  }
  tables.commands.select(item);
  redraw();
}

const SHAPES = "grid block cluster dynamic_smem_nbytes programmatic dst src nbytes value condition output sizes".split(" ");

function details(item) {
  const nodes = item.nodes?.map(([op, source]) => (source ? `${op} (${source})` : op)).join(", ");
  const given = SHAPES.filter((key) => item[key] && !/^[01]x[01]x[01]$/.test(item[key]));
  const long = [["op", item.op], ["source", item.source], ["kernel", item.kernel?.symbol], ["runs", nodes || item.bodies]];
  const short = [
    ["time", time(item.duration) + (program.measured && !item.measured_ns ? ", not measured" : "")],
    ["share", item.share === null ? "" : share(item.share)], ["from", time(item.start)], ["to", time(item.end)],
    ["stream", item.stream], ["critical path", item.critical ? "yes" : ""], ["origin", item.origin],
    ["touches", bytes(item.touched)],
    ["floor", item.used === null ? "" : `${time(item.floor)}, ${share(item.used)} of the time`],
    ...given.map((key) => [key.replaceAll("_", " "), item[key]]),
  ];
  return [
    element("button", { className: "close", onclick: () => select(null) }, "Esc"),
    element("h3", {}, `Command ${item.id}: ${item.kind}`),
    element("div", { className: "facts" }, list(long), list(short)),
  ];
}

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const isFound = (item) => words.every((word) => item.text.includes(word));
  $("search").value = text;
  matches = words.length ? new Set(items.filter(isFound)) : null;
  const found = Object.entries(tables).map(([name, table]) => [table.find(words), name]).filter(([n]) => n);
  const told = found.map(([n, name]) => `${count(n)} ${name}`).join(", ");
  $("found").textContent = words.length ? told || "nothing found" : "";
  redraw();
}

/** Select the next command or the one before, of those that match the search if there is one. */
function step(by) {
  const among = matches ? [...matches] : items, now = among.indexOf(selected);
  if (among.length) select(among.at((now + (now < 0 && by < 0 ? 0 : by)) % among.length));
}

const KEYS = {
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => step(-1), ArrowDown: () => step(1),
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, program.duration),
  Enter: () => step(1), "/": () => $("search").select(), Escape: () => (selected ? select(null) : search("")),
};

onkeydown = (event) => {
  const typing = event.target === $("search");
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  const others = event.key === "Enter" ? "select, button, a" : "select";
  if (typing ? !["Enter", "Escape"].includes(event.key) : event.target.closest?.(others)) return;
  // Without a selected command, up and down scroll the page.
  if (["ArrowUp", "ArrowDown"].includes(event.key) && !selected) return;
  if (event.key === "Escape") document.activeElement.blur();
  KEYS[event.key]();
  event.preventDefault();
};

// --- sections

function summary() {
  const tensors = ["input", "output"].flatMap((side) => program[`${side}s`].map((tensor) => ({ side, ...tensor })));
  const parts = ["weights", "code", "state", "metadata"].map((name) => ({ name, nbytes: facts.sizes[name] }));
  const kept = program.schedule?.candidates.find((each) => each.policy === program.schedule.policy);
  const stored = (row) => row.nbytes / (facts.sizes.file || 1);
  const { golden } = program, commands = Object.fromEntries(Object.entries(program.commands).filter(([, n]) => n));
  const replaceable = total(facts.refits.map((refit) => refit.weights.length));
  const card = (style, title, node) => element("div", { className: `card ${style}` }, element("h3", {}, title), node);
  return [
    card("wide", "Inputs and outputs", makeTable([
      column("", (row) => row.side, "muted", 80), column("name", (row) => row.name, "mono"), column("type", type, "mono"),
      numbers("bytes", (row) => row.nbytes, bytes), column("place", (row) => row.place, "mono", 200),
    ], tensors).node),
    card("", `Sizes: file of ${bytes(facts.sizes.file)}, arena of ${bytes(program.regions.arena)}`, makeTable([
      column("in the file", (row) => row.name), numbers("bytes", (row) => row.nbytes, count, null, 130),
      numbers("share", stored, share, stored),
    ], parts).node),
    card("", "One run", list([
      ["simulated", program.measured ? time(program.duration) : ""],
      ["measured", kept?.duration_ns ? time(kept.duration_ns) : ""],
      ["work", `${time(program.busy)}, ${(program.busy / (program.duration || 1)).toFixed(2)} commands at a time`],
      ["without time", program.unmeasured ? plural(program.unmeasured, "command") : ""],
      ["commands", joined(commands, (name, n) => `${count(n)} ${name}`)],
      ["ops", count(program.ops)], ["streams", `${program.streams}, with ${plural(program.events, "event")}`],
      ["critical path", plural(top.filter((item) => item.critical).length, "command")],
      ["dimensions", joined(program.profile, (name, size) => `${name} ${size} (${program.fits[name]})`)],
      ["golden run", golden && `seed ${golden.seed}, tolerance ${golden.tolerance}`],
    ])),
    card("", "Plan", list([
      ["target", facts.target], ["made by", facts.producer],
      ["made on", joined(facts.device, (name, value) => `${name.replaceAll("_", " ")} ${value}`.replace(/^name /, ""))],
      ["versions", joined(facts.versions, (name, version) => `${name} ${version}`)],
      ["modules", joined(facts.modules, (origin, { count: n, nbytes }) => `${count(n)} of ${origin} (${bytes(nbytes)})`)],
      ["refit", replaceable ? `${plural(replaceable, "weight")} can be replaced` : ""],
    ])),
  ];
}

const most = (found, key = "duration_ns") => found.reduce((longest, row) => Math.max(longest, row[key]), 1);
const floors = facts.bandwidth ? [{
  ...numbers("floor", (row) => row.used, null, null, 124),
  text: (row) => (row.used === null ? "" : `${time(row.floor)}  ${share(row.used)}`),
  hint: "the time in which the GPU's memory moves the bytes that are touched, and its share; caches may be faster",
}] : [];

/** The column of times; those that were not measured have a sign for it. */
const taken = (longest) => ({
  ...numbers("time", (row) => row.duration, null, (row) => row.duration / longest),
  text: (row) => (row.measured_ns || !program.measured ? "" : "~") + time(row.duration),
});

function commandsTable() {
  return makeTable([
    column("#", (row) => row.id, "", 64), numbers("stream", (row) => row.stream, String, null, 72),
    numbers("start", (row) => row.start, time), taken(most(items, "duration")),
    numbers("share", (row) => row.share, share, null, 72), ...floors,
    column("op", (row) => row.op, "mono", 170), column("source", (row) => row.source, "mono tail"),
    column("origin", (row) => row.origin, "", 90), column("kernel", (row) => row.label, "mono"),
  ], rows, select);
}

function kernelsTable() {
  const found = new Map();
  for (const item of items.filter(({ kernel }) => kernel)) {
    const row = found.get(item.number) ?? { ...item.kernel, launches: 0, duration: 0, share: 0, floor: 0, measured_ns: 1 };
    row.launches++;
    row.duration += item.duration;
    row.share += item.share;
    row.measured_ns = item.measured_ns && row.measured_ns;
    row.floor += item.used === null ? NaN : item.floor;
    row.used = row.floor / row.duration || null;
    found.set(item.number, row);
  }
  const list = [...found.values()].sort((a, b) => b.duration - a.duration);
  return makeTable([
    column("kernel", (row) => row.symbol, "mono"), column("origin", (row) => row.origin, "", 150),
    numbers("launches", (row) => row.launches), taken(most(list, "duration")), numbers("share", (row) => row.share, share),
    numbers("mean", (row) => row.duration / row.launches, time), ...floors, numbers("module", (row) => row.nbytes, bytes),
  ], list, (row) => search(row.symbol));
}

function weightsTable() {
  const state = facts.state.map((row) => ({ ...row, use: joined(row.uses, (name, use) => `${name}: ${use}`) || "unused" }));
  const all = [...facts.weights, ...state].sort((a, b) => b.nbytes - a.nbytes);
  const sum = total(all.map((row) => row.nbytes));
  return makeTable([
    column("name", (row) => row.name || "(scratch memory of kernels)", "mono"), column("type", type, "mono"),
    ...(state.length ? [column("state", (row) => row.use ?? "")] : []),
    numbers("bytes", (row) => row.nbytes, count, (row) => row.nbytes / (all[0].nbytes || 1), 130),
    numbers("share", (row) => row.nbytes / sum, share), numbers("offset", (row) => row.offset, count, null, 130),
  ], all);
}

function layersTable() {
  return makeTable([
    column("layer", (row) => row.layers.join(" + ") || "(none)", "mono"),
    column("phase", (row) => row.phases.join(" + "), "", 150), numbers("launches", (row) => row.launches),
    numbers("copies", (row) => row.copies), numbers("written", (row) => row.written, bytes),
    numbers("time", (row) => row.duration_ns || null, time, (row) => row.duration_ns / most(program.layers)),
  ], program.layers, (row) => search(row.layers.join(" ")));
}

function tuning() {
  const { policy, streams, syncs, fewest_syncs, antichain, arena, arena_lower_bound: bound, candidates } = program.schedule;
  return [
    list([
      ["kept", `${policy}: ${plural(streams, "stream")}, ${plural(syncs, "wait")} of one stream for another`],
      ["concurrency", `at most ${plural(antichain.length, "command")} at a time; all of it takes ${plural(fewest_syncs, "wait")}`],
      ["arena", `${bytes(arena)}${bound ? `, ${share(arena / bound - 1)} above what is live at a time` : ""}`],
    ]),
    makeTable([
      column("schedule that tuning tried", (row) => row.policy + (row.policy === policy ? " (kept)" : "")),
      numbers("streams", (row) => row.streams), numbers("waits", (row) => row.syncs),
      numbers("arena", (row) => row.arena, count, null, 130),
      numbers("time", (row) => row.duration_ns || null, time, (row) => row.duration_ns / most(candidates), 130),
    ], candidates).node,
    element("p", { className: "muted" }, "Of the kernels that tuning tried, a plan has the fastest alone."),
  ];
}

/** Show a program: all sections depend on it. */
function open(index) {
  program = facts.programs[index];
  rows = [];
  place(program, "", 0, 1, 0, 0);
  items = rows.filter((row) => !row.heading);
  top = items.filter((item) => !item.depth);
  const taken = rowsOf(program);
  [streamRows, rowCount, view, selected] = [starts(taken), total(taken) || 1, [0, program.duration || 1], null];
  tables = { commands: commandsTable(), kernels: kernelsTable(), weights: weightsTable() };
  if (program.layers.length) tables.layers = layersTable();
  const sections = Object.entries(tables).map(([name, table]) => [name, table.node]);
  if (program.schedule) sections.splice(2, 0, ["tuning", ...tuning()]);
  const used = new Set(items.flatMap(({ kernel }) => kernel ?? [])).size;
  const notes = { commands: count(items.length), kernels: `${count(used)} of ${count(facts.kernels.length)} in the plan` };
  const title = (name) => name[0].toUpperCase() + name.slice(1);
  const head = (name) => element("h2", {}, `${title(name)} `, element("small", {}, notes[name] ?? ""));
  measureMemory();
  $("simulated").textContent = (program.measured ? "simulated from the durations of single commands"
    : "no durations in the plan: every command counts the same") + "; the critical path is underlined in red";
  $("cards").replaceChildren(...summary());
  $("tables").replaceChildren(...sections.map(([id, ...nodes]) => element("section", { id }, head(id), ...nodes)));
  const link = ({ id }) => element("a", { href: `#${id}` }, title(id));
  $("nav").replaceChildren(...[...document.querySelectorAll("main section")].map(link));
  if ($("search").value) search($("search").value);
  select(null);
  recolour();
}

document.title = $("title").textContent = facts.file;
$("program").append(...facts.programs.map(({ name }, value) => element("option", { value }, `program ${name}`)));
$("program").hidden = facts.programs.length < 2;
$("program").onchange = () => open($("program").value);
$("colour").onchange = dark.onchange = recolour;
$("search").oninput = () => search($("search").value);
[$("in").onclick, $("out").onclick, $("fit").onclick] = [KEYS["+"], KEYS["-"], KEYS[0]];
onresize = redraw;
[$("streams"), $("memory")].forEach(watch);
open(0);
