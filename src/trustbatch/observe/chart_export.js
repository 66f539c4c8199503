"use strict";
// A chart as a file: CSV with its numbers, PNG with its picture.
const ChartFiles = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset",
    "stroke-linecap", "stroke-linejoin", "opacity", "font", "text-anchor"];
  const PNG_SCALE = 2, ROW = 18, MARGIN = 12;

  // A cell that a spreadsheet neither splits nor calculates.
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\r\n']/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  // One line for every point of every line shown, as measured: never smoothed.
  function csv(chart, lines, clocks) {
    const around = lines.some(({ series }) => series.spread || series.bands?.length);
    const units = chart.x === "step"
      ? ["tokens", "hours"].filter((unit) => lines.some((each) => clocks.get(each.series.run)?.[unit]))
      : [];
    const rows = [["run", chart.x, ...units, chart.key, ...(around ? ["low", "high"] : [])]];
    for (const { series } of lines) {
      const places = units.map((unit) => Lines.onClock(series.x, clocks.get(series.run), unit));
      const [low, high] = series.spread ?? series.bands?.[0] ?? [];
      series.x.forEach((x, place) => rows.push([
        series.name, x, ...places.map((each) => each?.[place]), series.y[place],
        ...(around ? [low?.[place], high?.[place]] : []),
      ]));
    }
    return rows.map((row) => row.map(cell).join(",") + "\n").join("");
  }

  function element(tag, attributes, text = "") {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }

  // A picture outside of the page has no stylesheet: every element gets what the page gave it.
  function withStyles(drawn) {
    const copy = drawn.cloneNode(true);
    const originals = drawn.querySelectorAll("*");
    copy.querySelectorAll("*").forEach((each, place) => {
      const style = getComputedStyle(originals[place]);
      for (const name of DRAWN) each.style.setProperty(name, style.getPropertyValue(name));
    });
    copy.querySelectorAll(".cursor, .selection").forEach((each) => each.remove());
    return copy;
  }

  function picture(title, drawn, lines) {
    const { width, height } = drawn.viewBox.baseVal;
    const page = getComputedStyle(document.documentElement);
    const ink = page.getPropertyValue("--ink"), back = page.getPropertyValue("--card");
    const rows = Math.ceil(lines.length / 2);
    const size = [width + 2 * MARGIN, height + 3 * MARGIN + ROW * (rows + 1)];
    const [wide, high] = size;
    const whole = element("svg", { xmlns: SVG, width: wide, height: high, viewBox: `0 0 ${wide} ${high}` });
    const words = { fill: ink, "font-family": "sans-serif" };
    whole.append(
      element("rect", { width: wide, height: high, fill: back }),
      element("text", { x: MARGIN, y: MARGIN + 13, "font-size": 14, "font-weight": 600, ...words }, title),
    );
    const copy = withStyles(drawn);
    for (const [key, value] of Object.entries({ x: MARGIN, y: MARGIN + ROW + 4, width, height })) {
      copy.setAttribute(key, value);
    }
    whole.append(copy);
    lines.forEach(({ series }, place) => {
      const x = MARGIN + (place % 2) * (width / 2);
      const y = height + 2 * MARGIN + ROW * (1.5 + Math.floor(place / 2));
      const line = drawn.querySelector(`[data-line="${series.line}"] .line`);
      const style = line && getComputedStyle(line);
      whole.append(
        element("line", {
          x1: x, x2: x + 24, y1: y - 4, y2: y - 4, stroke: style?.stroke ?? ink, "stroke-width": 2.4,
          "stroke-dasharray": style?.strokeDasharray ?? "none",
        }),
        element("text", { x: x + 32, y, "font-size": 11, ...words }, series.name),
      );
    });
    return { whole, size };
  }

  function png(title, drawn, lines) {
    const { whole, size } = picture(title, drawn, lines);
    const image = new Image();
    const written = new XMLSerializer().serializeToString(whole);
    return new Promise((resolve, reject) => {
      image.onload = () => {
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = size.map((length) => length * PNG_SCALE);
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture"))));
      };
      image.onerror = () => reject(new Error("no picture"));
      image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(written)}`;
    });
  }

  function save(blob, title, ending) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    const name = title.replace(/[^A-Za-z0-9.@-]+/g, "-").replace(/^[-.]+|-+$/g, "");
    link.download = `${name || "chart"}.${ending}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  return {
    csv,
    saveCsv: (chart, lines, clocks) =>
      save(new Blob([csv(chart, lines, clocks)], { type: "text/csv" }), chart.title, "csv"),
    savePng: async (chart, drawn, lines) => save(await png(chart.title, drawn, lines), chart.title, "png"),
  };
})();
