"use strict";
// Line charts in SVG, drawn in the page from data: zoom, smoothing, other axes, legends, values under
// the pointer. Text reaches the page as text content or an attribute, never as markup.
//
// A chart is {key, title, x, scale, smoothed, marked, level, limits, x_include, y_include, lead,
// unfiltered, series}, a series {line, run, name, x, y, bands, spread, faint}: `line` is its color and
// what a legend switches, `run` has its clock, bands are pairs of curves around it, and spread is the
// smallest and the largest value where a point stands for several steps.
const Charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLORS = 8, DASHES = 3;
  const AUTO_LOG = 100; // times the smallest value, from which on an axis is logarithmic
  const FRAME_MS = 12; // of drawing before the page may react again
  const DRAGGED = 8; // pixels: less is a click
  const DASH = 7;
  const TIP_ROWS = 16;
  const view = { x: "step", smoothing: 0.05, hidden: new Set(), query: "" };
  const clocks = new Map();
  const charts = new Set();
  const waiting = new Set();
  const listeners = new Set();

  function make(tag, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function html(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const px = (value) => String(Math.round(value * 10) / 10);
  const styleOf = (line) => `c${line % COLORS} d${Math.floor(line / COLORS) % DASHES}`;
  const isFound = (series, chart) => chart.unfiltered
    || series.name.toLowerCase().includes(view.query.toLowerCase());

  function swatch(line) {
    const look = { class: `swatch ${styleOf(line)}`, viewBox: "0 0 26 8", "aria-hidden": "true" };
    return make("svg", look, make("line", { class: "line", x1: 2, x2: 24, y1: 4, y2: 4 }));
  }

  // Changes that concern all charts; they are drawn again a few at a time, the visible ones first.
  function change(changes) {
    Object.assign(view, changes);
    for (const listener of listeners) listener(view);
    for (const chart of charts) chart.refresh();
  }

  function toggle(line) {
    if (!view.hidden.delete(line)) view.hidden.add(line);
    change({});
  }

  // Shows one line alone, or all where it is alone already.
  function isolate(line) {
    const linesOf = (chart) => chart.model.series.map((each) => each.line);
    const alike = [...charts].map(linesOf).filter((lines) => lines.includes(line));
    const others = new Set(alike.flat());
    others.delete(line);
    const isAlone = !view.hidden.has(line) && [...others].every((each) => view.hidden.has(each));
    change({ hidden: isAlone ? new Set() : others });
  }

  function drawSome() {
    const start = performance.now();
    const order = [...waiting].sort((a, b) => Number(b.isInView()) - Number(a.isInView()));
    for (const chart of order) {
      waiting.delete(chart);
      chart.draw();
      if (performance.now() - start > FRAME_MS) break;
    }
    if (waiting.size) requestAnimationFrame(drawSome);
  }

  function drawAll() {
    for (const chart of waiting) chart.draw();
    waiting.clear();
  }

  const tip = html("div", { class: "tip", hidden: "" });

  class Chart {
    constructor(figure, model) {
      this.figure = figure;
      this.model = model;
      this.zoom = null;
      this.isLog = null; // as the data asks for, until the reader chooses
      this.place = html("div", { class: "plot" });
      this.names = html("ul", { class: "legend" });
      this.names.addEventListener("click", (event) => this.choose(event));
      this.names.addEventListener("keydown", (event) => this.choose(event));
      this.fold = html("details", { class: "fold" }, html("summary"), this.names);
      this.fold.open = this.isShort();
      this.figure.append(this.buttons(), this.place, this.fold);
      new ResizeObserver(() => {
        if (this.place.clientWidth !== this.width) this.refresh();
      }).observe(this.place);
      charts.add(this);
      this.refresh();
    }

    // Whether all names are listed; a longer list opens on a click.
    isShort() {
      return Boolean(this.model.lead) || this.model.series.length <= COLORS;
    }

    button(label, title, act) {
      const made = html("button", { type: "button", title }, label);
      made.addEventListener("click", act);
      return made;
    }

    buttons() {
      this.reset = this.button("reset", "Show the whole chart again", () => this.setZoom(null));
      this.scale = this.button("log", "Switch between a linear and a logarithmic axis", () => {
        this.isLog = !this.y.log;
        this.setZoom(this.zoom && { x: this.zoom.x, y: null });
      });
      return html("div", { class: "tools" }, this.reset, this.scale,
        this.button("CSV", "Save the numbers of the lines shown", () =>
          ChartFiles.saveCsv(this.model, this.lines, clocks)),
        this.button("PNG", "Save the picture", () =>
          ChartFiles.savePng(this.model, this.drawn, this.lines)));
    }

    setData(model) {
      this.model = model;
      this.refresh();
    }

    remove() {
      charts.delete(this);
      waiting.delete(this);
      this.figure.remove();
    }

    refresh() {
      if (!waiting.size) requestAnimationFrame(drawSome);
      waiting.add(this);
    }

    isInView() {
      const box = this.figure.getBoundingClientRect();
      return box.bottom > 0 && box.top < innerHeight;
    }

    setZoom(zoom) {
      this.zoom = zoom;
      this.draw();
    }

    draw() {
      this.width = this.place.clientWidth;
      if (!this.width) return; // in a part of the page that is closed
      const unit = this.model.x === "step" ? view.x : this.model.x;
      if (this.unit !== unit) this.zoom = null; // of another axis
      this.unit = unit;
      this.lines = this.model.series
        .filter((series) => !view.hidden.has(series.line) && isFound(series, this.model))
        .map((series) => Lines.shown(series, this.model, view, clocks)).filter(Boolean);
      this.equal = Lines.equalLines(this.lines);
      this.x = this.xAxis();
      this.y = this.yAxis();
      this.frame = this.frameOf();
      const label = { class: "chart", role: "img", "aria-label": this.model.title };
      const { width, height } = this.frame;
      this.drawn = make("svg", { ...label, viewBox: `0 0 ${width} ${height}`, height },
        ...this.grid(), this.inside());
      this.drawn.addEventListener("pointermove", (event) => this.hover(event));
      this.drawn.addEventListener("pointerleave", () => this.leave());
      this.drawn.addEventListener("pointerdown", (event) => this.startDrag(event));
      this.drawn.addEventListener("dblclick", () => this.setZoom(null));
      this.place.replaceChildren(this.drawn);
      this.reset.hidden = !this.zoom;
      this.scale.textContent = this.y.log ? "linear" : "log";
      this.scale.hidden = !this.y.log && !this.values.some((value) => value > 0);
      this.figure.classList.toggle("crowd", this.lines.length > COLORS);
      this.fold.classList.toggle("short", this.isShort());
      this.fold.firstChild.textContent = `${this.model.series.length} lines`;
      this.listNames();
    }

    xAxis() {
      const all = Lines.valuesOf(this.lines, null, true);
      if (this.zoom?.x) return Axes.exact(this.zoom.x, { smallest: this.unit === "step" ? 1 : 0 });
      if (this.unit === "k") return Axes.doubling(Math.max(...all, ...(this.model.x_include ?? [])));
      const parts = Math.max(Math.floor(this.width / 90), 3);
      const included = view.x === "step" || this.model.x !== "step" ? this.model.x_include ?? [] : [];
      const smallest = this.unit === "step" || this.unit === "lag" ? 1 : 0;
      return Axes.exact([...all, ...included], { parts, smallest });
    }

    yAxis() {
      this.values = Lines.valuesOf(this.lines, this.zoom?.x);
      const shared = this.zoom?.x ? [] : this.model.y_include ?? [];
      const values = [...this.values, ...shared];
      const [low, high] = Axes.extent(values) ?? [0, 0];
      const isWide = low > 0 && high / low > AUTO_LOG;
      const { scale, limits } = this.model;
      const isLog = this.isLog ?? (scale === "log" || (scale === "auto" && isWide));
      if (this.zoom?.y) {
        return isLog ? Axes.log(this.zoom.y, { isExact: true }) : Axes.exact(this.zoom.y, { parts: 5 });
      }
      if (isLog) return Axes.log(values, limits ? { limits } : {});
      return Axes.linear(values, { zero: scale === "zero" });
    }

    frameOf() {
      const longest = Math.max(3, ...this.y.ticks.map((tick) => tick.label.length));
      const height = Math.round(Math.min(Math.max(this.width * (this.model.lead ? 0.5 : 0.55), 190), 360));
      const half = 3.3 * (this.x.ticks.at(-1)?.label.length ?? 0); // of a label at the very end
      const right = this.width - Math.max(14, half);
      return { width: this.width, height, left: 14 + 6.4 * longest, right, top: 8, bottom: height - 36 };
    }

    atX(value) {
      return this.frame.left + this.x.fraction(value) * (this.frame.right - this.frame.left);
    }

    atY(value) {
      return this.frame.bottom - this.y.fraction(value) * (this.frame.bottom - this.frame.top);
    }

    // An axis holds values inside its ends; a line that leaves a zoom must keep its slope.
    pixel(x, y) {
      const { left, right, top, bottom } = this.frame;
      const across = this.zoom?.x ? this.x.along(x) : this.x.fraction(x);
      const up = this.zoom?.y ? this.y.along(y) : this.y.fraction(y);
      return `${px(left + across * (right - left))},${px(bottom - up * (bottom - top))}`;
    }

    grid() {
      const { left, right, top, bottom, height } = this.frame;
      const parts = this.y.ticks.flatMap((tick) => {
        const y = px(this.atY(tick.value));
        const place = { x: px(left - 7), y: px(this.atY(tick.value) + 3.8) };
        const label = make("text", { class: "tick y", ...place }, tick.label);
        return [make("line", { class: "grid", x1: px(left), x2: px(right), y1: y, y2: y }), label];
      });
      for (const tick of this.x.ticks) {
        const place = { x: px(this.atX(tick.value)), y: bottom + 16 };
        parts.push(make("text", { class: "tick x", ...place }, tick.label));
      }
      if (this.model.level !== undefined) {
        const y = px(this.atY(this.model.level));
        parts.push(make("line", { class: "level", x1: px(left), x2: px(right), y1: y, y2: y }));
      }
      const name = make("text", { class: "axis", x: px((left + right) / 2), y: height - 5 }, this.unit);
      return [...parts, name];
    }

    // All areas and faint lines are behind all lines, so that no run's noise covers another's line.
    inside() {
      const behind = [], before = [];
      for (const each of this.lines) {
        const back = this.group(each.series);
        if (each.spread) back.append(this.area("spread", each.xs, ...each.spread));
        each.bands.forEach(([low, high], place) =>
          back.append(this.area(place ? "inner" : "outer", each.xs, low, high)));
        if (each.faint) back.append(this.path("faint", each.xs, each.faint));
        const front = this.group(each.series);
        const line = this.path("line", each.xs, each.line);
        const { members, place } = this.equal.get(each.series);
        if (members.length > 1) {
          // the dashes of one lie in the gaps of the others
          line.style.strokeDasharray = `${DASH} ${DASH * (members.length - 1)}`;
          line.style.strokeDashoffset = String(-DASH * place);
          line.style.strokeLinecap = "butt";
        }
        front.append(line);
        if (this.model.marked) front.append(this.path("dots", each.xs, each.line, true));
        behind.push(back);
        before.push(front);
      }
      // what a zoom leaves out is cut off at the frame
      const { left, right, top, bottom } = this.frame;
      const [x, y, width, height] = [left - 4, top - 4, right - left + 8, bottom - top + 8].map(px);
      const viewBox = `${x} ${y} ${width} ${height}`;
      return make("svg", { class: "inside", x, y, width, height, viewBox }, ...behind, ...before);
    }

    group(series) {
      return make("g", { class: `series ${styleOf(series.line)}`, "data-line": series.line });
    }

    // Pixels of a curve, a list for each part between gaps; a zoom keeps one point on either side.
    pixels(xs, values) {
      const parts = [[]];
      const first = this.zoom?.x ? Math.max(Lines.nearest(xs, this.x.low) - 1, 0) : 0;
      const last = this.zoom?.x ? Lines.nearest(xs, this.x.high) + 1 : xs.length - 1;
      for (let place = first; place <= last && place < xs.length; place++) {
        if (values[place] !== null) parts.at(-1).push(this.pixel(xs[place], values[place]));
        else if (parts.at(-1).length) parts.push([]);
      }
      return parts.filter((part) => part.length);
    }

    path(kind, xs, values, isDotted = false) {
      const parts = this.pixels(xs, values);
      // a single point is a very short stroke: its round caps make it a dot
      const drawn = parts.map((part) => (isDotted ? part.map((each) => `M${each}h.1`).join("")
        : `M${part[0]}` + (part.length > 1 ? `L${part.slice(1).join(" ")}` : "h.1"))).join("");
      return make("path", { class: kind, d: drawn });
    }

    area(kind, xs, low, high) {
      const below = this.pixels(xs, low), above = this.pixels(xs, high);
      const drawn = above.map((part, place) => `M${[...part, ...below[place].reverse()].join(" ")}Z`);
      return make("path", { class: kind, d: drawn.join("") });
    }

    listNames() {
      const listed = this.model.series.filter((series) => isFound(series, this.model));
      const key = JSON.stringify(listed.map((series) => [series.line, series.name]));
      // the items stay: one that is replaced between press and release would lose its click
      if (key !== this.listed) {
        this.names.replaceChildren(...listed.map((series) => html("li", {
          "data-line": series.line, role: "button", tabindex: "0",
          title: `${series.name}: a click hides or shows it, a double click shows it alone`,
        }, swatch(series.line), html("span", {}, series.name), html("small"))));
      }
      this.listed = key;
      listed.forEach((series, place) => {
        const item = this.names.children[place];
        item.setAttribute("aria-pressed", String(!view.hidden.has(series.line)));
        item.lastChild.textContent = this.remark(series);
      });
    }

    remark(series) {
      if (view.hidden.has(series.line)) return "";
      const equal = this.equal.get(series);
      if (!equal) return `no ${this.unit}`;
      return equal.place ? `same as ${equal.members[0].name}` : "";
    }

    choose(event) {
      const line = Number(event.target.closest("li")?.dataset.line ?? NaN);
      if (Number.isNaN(line)) return;
      if (event.type === "keydown") {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
      }
      toggle(line);
      if (event.detail === 2) isolate(line); // the first click has hidden or shown it
    }

    // Where the pointer is in the drawing, held inside the frame.
    pointer(event) {
      const box = this.drawn.getBoundingClientRect();
      const { left, right, top, bottom } = this.frame;
      return {
        x: Math.min(Math.max(event.clientX - box.left, left), right),
        y: Math.min(Math.max(event.clientY - box.top, top), bottom),
      };
    }

    rowsAt(x) {
      const value = this.x.valueAt((x - this.frame.left) / (this.frame.right - this.frame.left));
      const rows = [];
      for (const line of this.lines) {
        if (!line.xs.length) continue;
        const place = Lines.nearest(line.xs, value);
        const isNear = Math.abs(this.atX(line.xs[place]) - x) < 14;
        if (isNear && line.line[place] !== null) rows.push({ line, place });
      }
      return rows.sort((a, b) => b.line.line[b.place] - a.line.line[a.place]);
    }

    hover(event) {
      if (this.drag) return;
      const { x } = this.pointer(event);
      const rows = this.rowsAt(x);
      this.leave();
      if (!rows.length) return;
      const distance = ({ line, place }) => Math.abs(this.atX(line.xs[place]) - x);
      const closest = rows.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      const at = px(this.atX(closest.line.xs[closest.place]));
      const { top, bottom } = this.frame;
      this.drawn.append(make("line", { class: "cursor", x1: at, x2: at, y1: top, y2: bottom }));
      this.fillTip(rows, closest);
      tip.hidden = false;
      const isOver = event.clientX + 16 + tip.offsetWidth > innerWidth;
      tip.style.left = `${Math.max(isOver ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16, 4)}px`;
      const lowest = innerHeight - tip.offsetHeight - 4;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, lowest))}px`;
    }

    fillTip(rows, { line, place }) {
      const isSmooth = this.model.smoothed && view.smoothing > 0;
      const head = html("div", {}, `${this.unit} ${Axes.short(line.xs[place])}`,
        html("small", {}, isSmooth ? "moving average" : ""));
      const shown = rows.slice(0, TIP_ROWS).map((row) => {
        const { series } = row.line;
        const raw = series.y[row.place], value = row.line.line[row.place];
        const [low, high] = series.spread ?? series.bands?.[0] ?? [];
        const around = low?.[row.place] != null
          ? ` (${Axes.short(low[row.place])} to ${Axes.short(high[row.place])})` : "";
        const clamped = this.y.clamped && value <= this.y.low ? "≤ " : "";
        const measured = isSmooth && raw !== value && !around ? ` · ${Axes.short(raw)}` : "";
        return html("div", { class: styleOf(series.line) }, html("i"), html("span", {}, series.name),
          html("b", {}, clamped + Axes.short(value)), html("small", {}, around || measured));
      });
      const more = rows.length - shown.length;
      tip.replaceChildren(head, ...shown, ...(more > 0 ? [html("div", {}, `and ${more} more`)] : []));
    }

    leave() {
      tip.hidden = true;
      this.drawn.querySelector(".cursor")?.remove();
    }

    // A finger scrolls the page; a mouse or a pen that drags selects what to zoom to.
    startDrag(event) {
      if (event.button !== 0 || event.pointerType === "touch") return;
      const start = this.pointer(event);
      this.drag = { start, end: start, box: make("rect", { class: "selection" }) };
      this.drawn.append(this.drag.box);
      this.drawn.setPointerCapture(event.pointerId);
      const move = (moved) => this.moveDrag(this.pointer(moved));
      const end = () => {
        this.drawn.removeEventListener("pointermove", move);
        this.endDrag();
      };
      this.drawn.addEventListener("pointermove", move);
      this.drawn.addEventListener("pointerup", end, { once: true });
      this.drawn.addEventListener("pointercancel", end, { once: true });
    }

    // A flat drag selects a range below the chart, a steep one of values, others both.
    selected() {
      const { start, end } = this.drag;
      const { left, right, top, bottom } = this.frame;
      const wide = Math.abs(end.x - start.x), high = Math.abs(end.y - start.y);
      if (wide < DRAGGED && high < DRAGGED) return null;
      const isFlat = high < 3 * DRAGGED && wide >= DRAGGED, isSteep = wide < 3 * DRAGGED && high > wide;
      return {
        x: isSteep && !isFlat ? null : [start.x, end.x].sort((a, b) => a - b),
        y: isFlat ? null : [start.y, end.y].sort((a, b) => b - a),
        box: { left, right, top, bottom },
      };
    }

    moveDrag(end) {
      this.leave();
      this.drag.end = end;
      const selected = this.selected();
      if (!selected) return;
      const [left, right] = selected.x ?? [selected.box.left, selected.box.right];
      const [bottom, top] = selected.y ?? [selected.box.bottom, selected.box.top];
      const place = { x: left, y: top, width: right - left, height: bottom - top };
      for (const [key, value] of Object.entries(place)) this.drag.box.setAttribute(key, px(value));
    }

    endDrag() {
      const selected = this.selected();
      this.drag.box.remove();
      this.drag = null;
      if (!selected) return;
      const { left, right, top, bottom } = this.frame;
      const along = (x) => this.x.valueAt((x - left) / (right - left));
      const up = (y) => this.y.valueAt((bottom - y) / (bottom - top));
      this.setZoom({
        x: selected.x ? selected.x.map(along) : this.zoom?.x ?? null,
        y: selected.y ? selected.y.map(up) : selected.x ? null : this.zoom?.y ?? null,
      });
    }
  }

  addEventListener("beforeprint", drawAll);
  document.addEventListener("DOMContentLoaded", () => document.body.append(tip));

  return {
    view, clocks, change, html, swatch, drawAll,
    mount: (figure, model) => new Chart(figure, model),
    onChange: (listener) => listeners.add(listener),
    isBusy: () => waiting.size > 0,
  };
})();
