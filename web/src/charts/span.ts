/** A range of an axis: moved and zoomed, always inside another range. */

export type Span = readonly [number, number];

export const ENDLESS: Span = [-Infinity, Infinity];

/** Limit to `all`, and to at least `smallest`. */
export function heldSpan([from, to]: Span, all: Span, smallest: number): Span {
  const length = Math.min(all[1] - all[0], Math.max(smallest, to - from));
  const middle = (from + to) / 2;
  const start = Math.min(Math.max(to - from < length ? middle - length / 2 : from, all[0]), all[1] - length);
  return [start, start + length];
}

/** Move; the length is kept. */
export function movedSpan([from, to]: Span, all: Span, by: number): Span {
  const allowed = Math.min(Math.max(by, all[0] - from), all[1] - to);
  return [from + allowed, to + allowed];
}

/** Zoom; `by` below 1 zooms in, `at` stays in place. */
export function zoomedSpan([from, to]: Span, at: number, by: number): Span {
  return [at - (at - from) * by, at + (to - at) * by];
}
