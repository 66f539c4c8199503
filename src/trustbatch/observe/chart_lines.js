"use strict";
// From the data of a chart to the lines that it shows: smoothing, other horizontal axes, equal lines.
const Lines = (() => {
  // A centered moving average over this share of the points; gaps stay gaps.
  function smooth(values, share) {
    const half = halfWindow(values.length, share);
    if (!half) return values;
    const sums = [0], counts = [0];
    values.forEach((value, place) => {
      sums.push(sums[place] + (value ?? 0));
      counts.push(counts[place] + (value === null ? 0 : 1));
    });
    return values.map((value, place) => {
      if (value === null) return null;
      const first = Math.max(0, place - half), end = Math.min(values.length, place + half + 1);
      return (sums[end] - sums[first]) / (counts[end] - counts[first]);
    });
  }

  function halfWindow(length, share) {
    if (share <= 0 || length < 8) return 0;
    return Math.max(Math.floor((length * share) / 2), 1);
  }

  // Steps as tokens or hours: `clock` has both at some steps, and what lies between is linear.
  function onClock(steps, clock, unit) {
    const known = clock?.[unit];
    if (!known?.length) return null;
    return steps.map((step) => {
      const after = lowerBound(clock.step, step);
      if (after === 0) return known[0];
      if (after === known.length) return known[after - 1];
      const left = clock.step[after - 1], right = clock.step[after];
      const part = (step - left) / (right - left);
      return known[after - 1] + part * (known[after] - known[after - 1]);
    });
  }

  // The first place in ascending numbers that is not below a value.
  function lowerBound(numbers, value) {
    let low = 0, high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function nearest(numbers, value) {
    const after = lowerBound(numbers, value);
    if (after === 0) return 0;
    if (after === numbers.length) return after - 1;
    return value - numbers[after - 1] < numbers[after] - value ? after - 1 : after;
  }

  // What a chart shows of a series: its place on the horizontal axis, its line and what is around.
  function shown(series, chart, view, clocks) {
    const isClock = chart.x === "step" && view.x !== "step";
    const xs = isClock ? onClock(series.x, clocks.get(series.run), view.x) : series.x;
    if (xs === null) return null;
    const isSmooth = chart.smoothed && view.smoothing > 0;
    const soft = (values) => (isSmooth ? smooth(values, view.smoothing) : values);
    return {
      series,
      xs,
      line: soft(series.y),
      bands: (series.bands ?? []).map(([low, high]) => [soft(low), soft(high)]),
      spread: series.spread ?? null,
      faint: series.faint ?? (isSmooth && !series.spread ? series.y : null),
    };
  }

  // Lines that are the same, number by number, would hide each other: the first has the others.
  function equalLines(lines) {
    const first = new Map(), groups = new Map();
    for (const each of lines) {
      const key = JSON.stringify([each.series.x, each.series.y]);
      if (!first.has(key)) first.set(key, []);
      first.get(key).push(each.series);
    }
    for (const members of first.values()) {
      members.forEach((series, place) => groups.set(series, { members, place }));
    }
    return groups;
  }

  // All values that an axis must hold, of the points whose place is in `range`.
  function valuesOf(lines, range, xs = null) {
    const found = [];
    for (const each of lines) {
      const parts = [each.line, each.faint, ...(each.spread ?? []), ...each.bands.flat()];
      each.xs.forEach((x, place) => {
        if (range && (x < range[0] || x > range[1])) return;
        if (xs) found.push(x);
        else for (const part of parts) if (part && part[place] !== null) found.push(part[place]);
      });
    }
    return found;
  }

  return { smooth, onClock, nearest, shown, equalLines, valuesOf };
})();
