"use strict";
// The charts of a written page: their data are in the page, as JSON.
(() => {
  const read = (element) => JSON.parse(element.textContent);
  const clocks = document.getElementById("chart-clocks");
  for (const [run, clock] of clocks ? read(clocks).entries() : []) Charts.clocks.set(run, clock);
  const figures = [...document.querySelectorAll("script.chart-data")].map((data) => ({
    place: data.parentElement, model: read(data),
  }));
  if (!figures.length) return;
  const searched = figures.filter(({ model }) => !model.unfiltered);
  const lines = new Set(searched.flatMap(({ model }) => model.series.map((series) => series.line)));
  const isSmoothed = figures.some(({ model }) => model.smoothed);
  const { bar } = ChartToolbar.make({ numLines: lines.size, isSmoothed });
  document.querySelector(".charts").before(bar);
  for (const { place, model } of figures) Charts.mount(place, model);
})();
