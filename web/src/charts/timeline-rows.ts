/**
 * A timeline as rows of events, and where each row is drawn. Pure.
 *
 * A lane (a thread, a stream, the critical path) has one row per level of nested calls. The events of a row are sorted by start.
 */

import type { TimelineDocument } from "../api/report-document";
import type { Span } from "./span";

export interface Row {
  /** Index of its lane in the document. */
  lane: number;
  level: number;
  start: Float64Array;
  end: Float64Array;
  label: Int32Array;
  look: Uint8Array;
  count: Int32Array;
  top: number;
  height: number;
}

export interface Heading {
  top: number;
  text: string;
  /** Of a rank, above its lanes; otherwise of a lane, next to its rows. */
  rank: boolean;
  height: number;
}

export interface Layout {
  rows: Row[];
  headings: Heading[];
  height: number;
}

/** An event: index of its row, and of it in the row. */
export interface Place {
  row: number;
  event: number;
}

export const AXIS_PX = 22;
const ROW_PX = 16;
const RANK_PX = 22;
const GAP_PX = 6;

export function layoutOf(timeline: TimelineDocument): Layout {
  const rows: Row[] = [];
  const headings: Heading[] = [];
  let top = AXIS_PX;
  let rank: number | null = null;
  for (const [at, lane] of timeline.lanes.entries()) {
    if (lane.rank !== rank) {
      rank = lane.rank;
      headings.push({ top, text: `Rank ${rank}`, rank: true, height: RANK_PX });
      top += RANK_PX;
    }
    const own = rowsOf(timeline, at);
    headings.push({ top, text: lane.name, rank: false, height: own.length * ROW_PX });
    for (const row of own) {
      rows.push({ ...row, top, height: ROW_PX - 1 });
      top += ROW_PX;
    }
    top += GAP_PX;
  }
  return { rows, headings, height: top };
}

/** The rows of a lane, whose starts are differences. */
function rowsOf(timeline: TimelineDocument, at: number): Omit<Row, "top" | "height">[] {
  const lane = timeline.lanes[at];
  if (lane === undefined) return [];
  const rows: Omit<Row, "top" | "height">[] = [];
  let first = 0;
  let before = 0;
  while (first < lane.start.length) {
    const level = lane.level[first] ?? 0;
    let next = first;
    while (next < lane.start.length && lane.level[next] === level) next += 1;
    const start = new Float64Array(next - first);
    const end = new Float64Array(next - first);
    for (let event = first; event < next; event += 1) {
      before += lane.start[event] ?? 0;
      start[event - first] = before;
      end[event - first] = before + (lane.dur[event] ?? 0);
    }
    const of = (values: number[]): number[] => values.slice(first, next);
    rows.push({ lane: at, level, start, end, label: Int32Array.from(of(lane.label)), look: Uint8Array.from(of(lane.look)), count: Int32Array.from(of(lane.count)) });
    first = next;
  }
  return rows;
}

/** The first and the last event (exclusive) of a row in a span. */
export function visible(row: Row, [from, to]: Span): [number, number] {
  let first = Math.max(0, bound(row.start, from) - 1);
  while (first < row.end.length && (row.end[first] ?? 0) < from) first += 1;
  return [first, bound(row.start, to)];
}

/** The event at a position, or the nearest within `near` nanoseconds; null: none. */
export function placeAt(layout: Layout, y: number, time: number, near: number): Place | null {
  const row = layout.rows.findIndex(({ top, height }) => y >= top && y <= top + height);
  const event = row < 0 ? null : nearest(layout.rows[row], time, near);
  return event === null ? null : { row, event };
}

/** The nearest event of the row, at most `near` away. */
export function nearest(row: Row | undefined, time: number, near: number): number | null {
  if (row === undefined) return null;
  const after = bound(row.start, time);
  let best: number | null = null;
  let distance = near;
  for (const event of [after - 1, after]) {
    const [start, end] = [row.start[event], row.end[event]];
    if (start === undefined || end === undefined) continue;
    const away = time < start ? start - time : Math.max(0, time - end);
    if (away <= distance) [best, distance] = [event, away];
  }
  return best;
}

/** How many values are at most `limit`, in an ascending array. */
function bound(values: Float64Array, limit: number): number {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] ?? 0) <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Round times for the axis: about `most` of them in the span. */
export function ticksOf([from, to]: Span, most: number): number[] {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5, 10].find((one) => one * power >= rough) ?? 10) * power;
  const found: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}
