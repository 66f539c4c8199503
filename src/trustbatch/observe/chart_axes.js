"use strict";
// Axes of charts: the range of values, its ticks, and the numbers written beside them.
const Axes = (() => {
  const LOG_FLOOR = 1e-16;
  const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

  // The 1, 2 or 5 times a power of ten that cuts `span` into about `parts` pieces.
  function niceStep(span, parts) {
    const rough = span / Math.max(parts, 1);
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    return ([1, 2, 5].find((factor) => rough <= factor * power * (1 + 1e-9)) ?? 10) * power;
  }

  function numberLabel(value, step) {
    if (Math.abs(value) < step * 1e-6) return "0";
    if (Math.abs(value) >= 1e6 || step < 1e-4) {
      const digits = Math.ceil(Math.log10(Math.abs(value) / step) + 1e-9) + 1;
      return Math.abs(value) >= 1e6 && Math.abs(value) < 1e15 ? compact.format(value)
        : Number(value.toPrecision(Math.min(Math.max(digits, 1), 15))).toExponential();
    }
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return value.toLocaleString("en",
      { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }

  const powerLabel = (power) =>
    "10" + [...String(power)].map((each) => (each === "-" ? "⁻" : SUPERSCRIPTS[each])).join("");

  function axis(low, high, ticks, more = {}) {
    const { log = false } = more;
    // along may leave the axis, fraction is held inside it
    const along = (value) => (log
      ? Math.log(Math.max(value, low * 1e-9) / low) / Math.log(high / low)
      : (value - low) / (high - low));
    const fraction = (value) => Math.min(Math.max(along(value), 0), 1);
    const valueAt = (part) => (log ? low * Math.pow(high / low, part) : low + part * (high - low));
    return { low, high, ticks, clamped: false, ...more, along, fraction, valueAt };
  }

  function linearTicks(low, high, parts, smallest = 0) {
    const step = Math.max(niceStep(high - low, parts), smallest);
    const ticks = [];
    for (let place = Math.ceil(low / step - 1e-9); place <= high / step + 1e-9; place++) {
      ticks.push({ value: place * step, label: numberLabel(place * step, step) });
    }
    return { step, ticks };
  }

  // A linear axis that ends at ticks; a curve that is constant, or nearly, gets some height.
  function linear(values, { zero = false, parts = 5 } = {}) {
    let [low, high] = extent(values) ?? [0, 1];
    if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      const pad = Math.abs(high) / 2 || 1;
      [low, high] = [low ? low - pad : 0, high + pad];
    }
    const step = niceStep(high - low, parts);
    const first = Math.floor(low / step + 1e-9) * step, last = Math.ceil(high / step - 1e-9) * step;
    return axis(first, last, linearTicks(first, last, parts).ticks);
  }

  // A linear axis from the first value to the last, for what lies below a chart and for zooms.
  function exact(values, { parts = 6, smallest = 0 } = {}) {
    let [low, high] = extent(values) ?? [0, 1];
    if (low === high) {
      return axis(low - 1, high + 1, [{ value: low, label: numberLabel(low, smallest || 0.01) }]);
    }
    return axis(low, high, linearTicks(low, high, parts, smallest).ticks);
  }

  // A logarithmic axis; what is zero, negative or beyond the limits lies on its ends. Where there
  // is such a value, the axis begins one decade below the smallest positive one.
  function log(values, { limits = [LOG_FLOOR, 1 / LOG_FLOOR], isExact = false } = {}) {
    const [floor, ceiling] = limits;
    let low = Infinity, high = -Infinity, clamped = false;
    for (const value of values) {
      if (value < floor) clamped = true;
      if (value > 0) {
        low = Math.min(low, Math.max(value, floor));
        high = Math.max(high, Math.min(value, ceiling));
      }
    }
    if (low > high) [low, high] = [floor, 1];
    if (isExact && high > low) return axis(low, high, logTicks(low, high), { log: true });
    if (high < 30 * low && !clamped) return narrowLog(low, high);
    let bottom = Math.floor(Math.log10(low) + 1e-9);
    if (clamped) bottom = Math.max(bottom - 1, Math.round(Math.log10(floor)));
    const top = Math.max(Math.ceil(Math.log10(high) - 1e-9), bottom + 1);
    const ticks = powers(bottom, top);
    if (clamped) ticks[0].label = `≤${ticks[0].label}`;
    return axis(ticks[0].value, Math.pow(10, top), ticks, { log: true, clamped });
  }

  function powers(bottom, top) {
    const stride = Math.max(Math.ceil((top - bottom) / 6), 1);
    const ticks = [];
    for (let power = bottom; power <= top; power += stride) {
      ticks.push({ value: Math.pow(10, power), label: powerLabel(power) });
    }
    return ticks;
  }

  function marksOf(low, high) {
    const marks = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power++) {
      for (const factor of [1, 2, 5]) marks.push(Number(`${factor}e${power}`));
    }
    return marks;
  }

  // About one decade: powers of ten alone would be too few ticks.
  function narrowLog(low, high) {
    const marks = marksOf(low, high);
    let first = marks.findLastIndex((mark) => mark <= low * (1 + 1e-9));
    let last = marks.findIndex((mark) => mark >= high * (1 - 1e-9));
    if (first === last) [first, last] = [first - 1, last + 1];
    const ticks = marks.slice(first, last + 1).map((value) => ({ value, label: short(value) }));
    return axis(marks[first], marks[last], ticks, { log: true });
  }

  function logTicks(low, high) {
    const inside = (tick) => tick.value >= low && tick.value <= high;
    if (high / low > 100) {
      return powers(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))).filter(inside);
    }
    const marks = marksOf(low, high).map((value) => ({ value, label: short(value) })).filter(inside);
    return marks.length > 1 ? marks : linearTicks(low, high, 4).ticks;
  }

  // The logarithmic axis of k: ticks at powers of two and at the end.
  function doubling(last) {
    const ticks = [];
    for (let k = 1; k < last; k *= 2) ticks.push({ value: k, label: String(k) });
    ticks.push({ value: last, label: String(last) });
    return axis(1, Math.max(last, 1.5), ticks, { log: true });
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (!Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [low, high] : null;
  }

  // A number in four digits, for values under the pointer.
  function short(value) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
    const shown = Number(value.toPrecision(4));
    return size < 1e-3 || size >= 1e6 ? shown.toExponential() : String(shown);
  }

  return { linear, exact, log, doubling, extent, short };
})();
