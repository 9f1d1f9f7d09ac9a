/** Many curves of one metric: the worst few by name, and the median of all. */

import type uPlot from "uplot";
import { token } from "../ui/theme";

export interface Curve {
  /** The owner, in words. */
  name: string;
  values: readonly (number | null)[];
}

/** Tick increments for an axis in bytes. */
export const BINARY = Array.from({ length: 60 }, (_, power) => 2 ** power);

/** A single value is drawn as a point, since it makes no line. */
const LONE: uPlot.Series.Points = { show: (plot, at) => lone(plot.data[at] ?? []), size: 7 };

export function lone(values: ArrayLike<number | null | undefined>): boolean {
  return Array.from(values).filter((value) => value != null).length === 1;
}

const COLORS = 6;
const DASHES: (number[] | undefined)[] = [undefined, [6, 4], [2, 3]];

/** The last value counts as much as the mean. */
function weight({ values }: Curve): number {
  let [sum, known, last] = [0, 0, 0];
  for (const value of values) {
    if (value === null || Number.isNaN(value)) continue;
    sum += value;
    known += 1;
    last = value;
  }
  return known === 0 ? Number.NaN : (sum / known + last) / 2;
}

/** The `most` worst curves, worst first; `bad`: which end is worse. Curves without values are left out. */
export function picked(curves: readonly Curve[], most: number, bad: "high" | "low"): Curve[] {
  const sign = bad === "high" ? -1 : 1;
  return curves
    .map((curve) => ({ curve, weight: weight(curve) }))
    .filter((one) => !Number.isNaN(one.weight))
    .sort((one, two) => sign * (one.weight - two.weight))
    .slice(0, most)
    .map(({ curve }) => curve);
}

/** The median at each point, over the curves that have a value there. */
export function medianCurve(curves: readonly Curve[]): (number | null)[] {
  const length = Math.max(0, ...curves.map(({ values }) => values.length));
  return Array.from({ length }, (_, at) => {
    const known = curves.flatMap(({ values }) => (typeof values[at] === "number" ? [values[at] as number] : [])).sort((one, two) => one - two);
    const middle = known.length >> 1;
    if (known.length === 0) return null;
    return known.length % 2 ? (known[middle] ?? null) : ((known[middle - 1] ?? 0) + (known[middle] ?? 0)) / 2;
  });
}

/** Color and dashes of line `at`; eighteen combinations. */
export function lineLook(at: number): { property: string; dash: number[] | undefined } {
  return { property: `--series-${at % COLORS}`, dash: DASHES[Math.floor(at / COLORS) % DASHES.length] };
}

export function lineSeries(name: string, at: number): uPlot.Series {
  const { property, dash } = lineLook(at);
  return { label: name, stroke: token(property), width: 1.5, ...(dash === undefined ? {} : { dash }), points: LONE, spanGaps: true };
}
