"use strict";
// Optional comfort: values under the pointer, and runs switched on and off through the legends.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const hidden = new Set();
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function toggle(run) {
    if (!hidden.delete(run)) hidden.add(run);
    for (const item of all(`[data-run="${run}"]`)) {
      if (item.matches("li")) item.setAttribute("aria-pressed", String(!hidden.has(run)));
      else item.classList.toggle("off", hidden.has(run));
    }
  }

  for (const item of all(".legend li")) {
    item.setAttribute("role", "button");
    item.setAttribute("aria-pressed", "true");
    item.tabIndex = 0;
    item.addEventListener("click", () => toggle(item.dataset.run));
    item.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle(item.dataset.run);
    });
  }

  const points = new WeakMap();
  function pointsOf(path) {
    if (!points.has(path)) {
      const pairs = path.getAttribute("d").matchAll(/(-?[\d.]+),(-?[\d.]+)/g);
      points.set(path, Array.from(pairs, (pair) => [Number(pair[1]), Number(pair[2])]));
    }
    return points.get(path);
  }

  function valueAt(chart, y) {
    const [bottom, top, low, high] = chart.dataset.y.split(" ").map(Number);
    const part = (bottom - y) / (bottom - top);
    if (!chart.dataset.log) return write(low + part * (high - low), (high - low) / 1000);
    const value = low * Math.pow(high / low, part);
    return (chart.dataset.clamped && part < 1e-3 ? "≤ " : "") + write(value, value / 100);
  }

  // Pixels hold about three digits; more would be invented.
  function write(value, precision) {
    if (Math.abs(value) < precision) return "0";
    const digits = Math.ceil(Math.log10(Math.abs(value) / precision));
    const size = Math.abs(value);
    const shown = Number(value.toPrecision(Math.min(Math.max(digits, 1), 6)));
    return size < 1e-3 || size >= 1e6 ? shown.toExponential() : String(shown);
  }

  function rowsAt(chart, x) {
    const rows = [];
    for (const group of all("g.series", chart)) {
      const path = group.querySelector(".line");
      if (!path || group.classList.contains("off")) continue;
      const nearest = pointsOf(path).reduce((a, b) =>
        Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      if (Math.abs(nearest[0] - x) < 12) rows.push({ group, nearest });
    }
    return rows.sort((a, b) => a.nearest[1] - b.nearest[1]);
  }

  function fill(chart, rows, x) {
    const [left, right, low, high] = chart.dataset.x.split(" ").map(Number);
    const part = (x - left) / (right - left);
    const step = Math.round(
      chart.dataset.xLog ? low * Math.pow(high / low, part) : low + part * (high - low));
    const head = document.createElement("div");
    const hover = chart.closest("[data-hover]")?.dataset.hover;
    head.textContent = `${chart.dataset.xName} ${step}` + (hover ? ` (${hover})` : "");
    tip.replaceChildren(head, ...rows.map(({ group, nearest }) => {
      const row = document.createElement("div");
      const mark = document.createElement("i");
      const name = document.createElement("span");
      const value = document.createElement("b");
      row.className = group.getAttribute("class");
      name.textContent = group.dataset.label;
      value.textContent = valueAt(chart, nearest[1]);
      row.append(mark, name, value);
      return row;
    }));
  }

  function leave(chart) {
    tip.hidden = true;
    chart.querySelector(".cursor")?.remove();
  }

  function move(chart, event) {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const rows = rowsAt(chart, x);
    leave(chart);
    if (!rows.length) return;
    const closest = rows.reduce((a, b) =>
      Math.abs(b.nearest[0] - x) < Math.abs(a.nearest[0] - x) ? b : a).nearest[0];
    const [bottom, top] = chart.dataset.y.split(" ");
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const place = { class: "cursor", x1: closest, x2: closest, y1: top, y2: bottom };
    for (const [key, value] of Object.entries(place)) cursor.setAttribute(key, value);
    chart.append(cursor);
    fill(chart, rows, closest);
    tip.hidden = false;
    const over = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = `${over ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16}px`;
    const lowest = innerHeight - tip.offsetHeight - 4;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, lowest))}px`;
  }

  for (const chart of all("svg.chart")) {
    chart.addEventListener("pointermove", (event) => move(chart, event));
    chart.addEventListener("pointerleave", () => leave(chart));
  }
})();
