// Axes: from data to a domain, from a domain to pixels and ticks.

function niceStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return step * power;
}

function linearTicks([low, high], count) {
  const step = niceStep(high - low, count);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks([low, high], count) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / (count + 1)));
  const ticks = [];
  for (let power = first; power <= last; power += stride) ticks.push(10 ** power);
  if (ticks.length >= 3) return ticks;
  return [1, 2, 5].flatMap((factor) => [first - 1, first, last].map((power) => factor * 10 ** power))
    .filter((tick, i, all) => tick >= low && tick <= high && all.indexOf(tick) === i).sort((a, b) => a - b);
}

// A map from [low, high] to [from, to] with ticks; log when asked.
function scale(domain, [from, to], {log = false, ticks = 4} = {}) {
  const warp = log ? Math.log10 : (value) => value;
  const low = warp(domain[0]), span = warp(domain[1]) - low;
  const map = (value) => from + ((warp(value) - low) / span) * (to - from);
  map.ticks = log ? logTicks(domain, ticks) : linearTicks(domain, ticks);
  map.domain = domain;
  map.log = log;
  return map;
}

function quantile(sorted, fraction) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(fraction * (sorted.length - 1))))];
}

// Numbers of float32 that should be equal differ in their last digits: these are one value, and no curve.
const ROUNDING = 2e-6;

function padded([low, high], fraction) {
  if (high - low <= ROUNDING * Math.max(Math.abs(low), Math.abs(high))) {
    const room = Math.abs(low) * 0.1 || 1;
    return [low - room, high + room];
  }
  return [low - (high - low) * fraction, high + (high - low) * fraction];
}

// What the vertical axis shows. Log when all values are positive and span more than a factor of 20. Otherwise
// linear, and when the first steps (or a spike) would squash everything else, cut to where the values live.
function valueDomain(values, allowLog) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const low = sorted[0], high = sorted[sorted.length - 1];
  if (allowLog && low > 0 && high / low > 20) return {domain: [low / 1.15, high * 1.15], log: true, cut: false};
  const core = [quantile(sorted, 0.07), quantile(sorted, 0.98)];
  const room = (core[1] - core[0]) * 0.25;
  if (room > 0 && sorted.length >= 30 && high - low > 2.5 * (core[1] - core[0])) {
    return {domain: [Math.max(low, core[0] - room), Math.min(high, core[1] + room)], log: false, cut: true};
  }
  const [bottom, top] = padded([low, high], 0.06);
  return {domain: [low >= 0 ? Math.max(0, bottom) : bottom, top], log: false, cut: false};
}
