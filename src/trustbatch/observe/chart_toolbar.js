"use strict";
// What all charts of a page have in common: the horizontal axis, the smoothing, and the lines shown.
const ChartToolbar = (() => {
  const { html, change, view } = Charts;
  const MANY = 8; // lines, from which on a box to search them pays
  const WIDEST = 0.4; // of a curve, averaged
  const UNITS = { step: "steps", tokens: "tokens", hours: "hours" };

  function axisChoice() {
    const chosen = html("select", {});
    const show = () => {
      const clocks = [...Charts.clocks.values()];
      const known = Object.keys(UNITS).filter((unit) => unit === "step" || clocks.some((each) => each[unit]));
      chosen.replaceChildren(...known.map((unit) => html("option", { value: unit }, UNITS[unit])));
      chosen.value = view.x;
      chosen.parentElement.hidden = known.length < 2;
    };
    chosen.addEventListener("change", () => change({ x: chosen.value }));
    return [html("label", { class: "axis-choice" }, "over ", chosen), show];
  }

  function smoothingSlider() {
    const slider = html("input", { type: "range", min: 0, max: 1, step: 0.01 });
    const shown = html("output", {});
    const show = () => {
      // the square: small windows are the interesting ones
      slider.value = String(Math.sqrt(view.smoothing / WIDEST));
      shown.textContent = view.smoothing ? `${Math.round(view.smoothing * 1000) / 10}%` : "off";
    };
    slider.addEventListener("input", () => change({ smoothing: Number(slider.value) ** 2 * WIDEST }));
    const title = "Moving average over this share of each line; faint lines are as measured";
    return [html("label", { class: "smoothing", title }, "smoothing ", slider, shown), show];
  }

  function searchBox() {
    const box = html("input", { type: "search", placeholder: "find lines by name" });
    box.addEventListener("input", () => change({ query: box.value }));
    return [html("label", { class: "search" }, box), () => { box.value = view.query; }];
  }

  // Returns the bar and what shows the state in it; `numLines` says how many lines there may be.
  function make({ numLines, isSmoothed }) {
    const parts = [axisChoice()];
    if (isSmoothed) parts.push(smoothingSlider());
    if (numLines > MANY) parts.push(searchBox());
    const all = html("button", { type: "button" }, "show all");
    all.addEventListener("click", () => change({ hidden: new Set(), query: "" }));
    const hint = html("span", { class: "hint help" }, "drag to zoom, double click to reset; names switch lines");
    const bar = html("div", { class: "toolbar", role: "toolbar" }, ...parts.map(([part]) => part), all, hint);
    const show = () => {
      for (const [, update] of parts) update();
      all.hidden = !view.hidden.size && !view.query;
    };
    Charts.onChange(show);
    show();
    return { bar, show };
  }

  return { make };
})();
