/**
 * Values as colors, for the map of ranks and steps.
 *
 * The stops are in styles/tokens.css, in even steps of lightness; colors in between are mixed in OKLab, so that equal
 * differences look equal. The range comes from quantiles of the values in steady steps, so that a few very long steps (warm-up,
 * stalls) do not make all others look alike. Values beyond the range get the color of its end, and the legend says so.
 */

export interface Range {
  /** Values up to this have the first color … */
  low: number;
  /** … and values from this on the last. */
  high: number;
  /** Minimum and maximum. */
  least: number;
  most: number;
}

export const STOPS = 7;
const SAMPLE = 16_384;
const QUANTILES = [0.01, 0.5, 0.99] as const;
/** The range extends at least this far below and above the median, so that noise does not look like a problem. */
const LEAST_BELOW = 0.04;
const LEAST_ABOVE = 0.16;
/** If the new range differs from the old one by less than this, the colors stay. */
const STEADY_SHARE = 0.08;
export const SHADES = 256;

/** A step is not steady if its median rank is this many quartile distances above the others … */
const FAR = 3;
/** … and by this share of the usual step. */
const FAR_SHARE = 0.25;
/** With fewer steps none is left out. */
const LEAST_COLUMNS = 8;

/** By column, whether its step is like most others; null: all are. */
function steadyColumns(cells: Float32Array, columns: number): Uint8Array | null {
  if (columns < LEAST_COLUMNS) return null;
  const middles = new Float32Array(columns);
  const rows = Math.floor(cells.length / columns);
  const column = new Float32Array(rows);
  for (let at = 0; at < columns; at += 1) {
    let taken = 0;
    for (let row = 0; row < rows; row += 1) {
      const value = cells[row * columns + at] as number;
      if (Number.isFinite(value)) column[taken++] = value;
    }
    middles[at] = taken === 0 ? Number.NaN : (column.subarray(0, taken).sort()[taken >> 1] ?? Number.NaN);
  }
  const sorted = middles.filter((value) => !Number.isNaN(value)).sort();
  const [lower, usual, upper] = [0.25, 0.5, 0.75].map((share) => sorted[Math.round(share * (sorted.length - 1))] ?? 0) as [number, number, number];
  const limit = Math.max(upper + FAR * (upper - lower), upper + FAR_SHARE * Math.abs(usual));
  return Uint8Array.from(middles, (value) => (value <= limit ? 1 : 0));
}

/** Range of the known values, row by row in this many columns; null if there are none. */
export function robustRange(cells: Float32Array, columns = 0): Range | null {
  const steady = steadyColumns(cells, columns);
  const every = Math.max(1, Math.floor(cells.length / SAMPLE));
  const found = new Float32Array(Math.ceil(cells.length / every));
  let taken = 0;
  let least = Infinity;
  let most = -Infinity;
  for (let at = 0; at < cells.length; at += 1) {
    const value = cells[at] as number;
    if (!Number.isFinite(value)) continue;
    if (value < least) least = value;
    if (value > most) most = value;
    if (at % every === 0 && (steady === null || steady[at % columns] === 1)) found[taken++] = value;
  }
  if (least > most) return null;
  // The sampled cells may all be unknown. Typed arrays sort natively, without a comparator.
  const sample = taken === 0 ? Float32Array.of(least, most) : found.subarray(0, taken).sort();
  const [low, middle, high] = QUANTILES.map((share) => sample[Math.round(share * (sample.length - 1))] ?? 0) as [number, number, number];
  const size = Math.abs(middle);
  return { low: Math.min(low, middle - size * LEAST_BELOW), high: Math.max(high, middle + size * LEAST_ABOVE) || 1, least, most };
}

/** Keep the old range if the new one is similar, so that colors do not flicker during a run. */
export function steadied(before: Range | null, now: Range | null): Range | null {
  if (before === null || now === null) return now ?? before;
  const width = before.high - before.low;
  const moved = Math.max(Math.abs(before.low - now.low), Math.abs(before.high - now.high));
  return moved <= width * STEADY_SHARE ? { ...now, low: before.low, high: before.high } : now;
}

/** From 0 (first color) to 1 (last color); NaN stays NaN. */
export function shareOf(value: number, range: Range): number {
  if (Number.isNaN(value)) return value;
  const width = range.high - range.low;
  if (!(width > 0)) return 0;
  return Math.min(1, Math.max(0, (value - range.low) / width));
}

/** `SHADES` colors between the stops (`#rrggbb`), as pixels of an ImageData: red in the lowest byte. */
export function shades(stops: readonly string[]): Uint32Array {
  const points = stops.map((stop) => toLab(channels(stop)));
  const found = new Uint32Array(SHADES);
  for (let at = 0; at < SHADES; at += 1) {
    const place = (at / (SHADES - 1)) * (points.length - 1);
    const below = Math.min(points.length - 2, Math.floor(place));
    const [one, two] = [points[below] ?? [0, 0, 0], points[below + 1] ?? [0, 0, 0]];
    const mixed = one.map((part, i) => part + ((two[i] ?? 0) - part) * (place - below));
    const [red = 0, green = 0, blue = 0] = fromLab(mixed);
    found[at] = (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  }
  return found;
}

/** Write a pixel for each value; unknown values stay transparent. Returns whether all are known. */
export function colored(cells: Float32Array, range: Range, colors: Uint32Array, pixels: Uint32Array): boolean {
  let whole = true;
  const scale = range.high > range.low ? (SHADES - 1) / (range.high - range.low) : 0;
  for (let at = 0; at < cells.length; at += 1) {
    const value = cells[at] as number;
    // Only NaN is unequal to itself.
    if (value !== value) {
      pixels[at] = 0;
      whole = false;
      continue;
    }
    const shade = (value - range.low) * scale;
    pixels[at] = colors[shade <= 0 ? 0 : shade >= SHADES - 1 ? SHADES - 1 : (shade + 0.5) | 0] as number;
  }
  return whole;
}

function channels(hex: string): number[] {
  const number = Number.parseInt(hex.trim().replace("#", ""), 16) || 0;
  return [(number >> 16) & 255, (number >> 8) & 255, number & 255].map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
}

function toLab([red = 0, green = 0, blue = 0]: readonly number[]): number[] {
  const long = Math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue);
  const middle = Math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue);
  const short = Math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue);
  return [
    0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
    1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
    0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
  ];
}

function fromLab([light = 0, a = 0, b = 0]: readonly number[]): number[] {
  const long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const middle = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short,
  ].map((part) => {
    const share = part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, share)));
  });
}
