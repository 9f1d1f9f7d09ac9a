/**
 * A piece of the map of ranks and steps from the hub: positions of its cells, their values, and appended columns.
 */

import type { Heat } from "../api/documents";
import type { HeatWindow } from "./heat-window";

export type Stat = "max" | "mean";

/** A request for a piece; the response may be smaller or coarser if the hub has no more. */
export interface HeatRequest {
  window: HeatWindow;
  /** Maximum steps and ranks per cell. */
  stepSpan: number;
  rankSpan: number;
}

export interface Piece {
  heat: Heat;
  stat: Stat;
  requested: HeatRequest;
  /** The covered range. */
  window: HeatWindow;
  /** Whether it reached the newest step when requested, so that new steps are appended. */
  open: boolean;
  /** Whether steps were appended. */
  grown: boolean;
  /** Steps and ranks per cell; the last column and row may be narrower. */
  stepSpan: number;
  rankSpan: number;
}

/** Adjacent cells of equal width that can be drawn at once: cells `from` to `to` lie at `start` to `end`. */
export interface Stretch {
  from: number;
  to: number;
  start: number;
  end: number;
}

export function pieceOf(heat: Heat, stat: Stat, requested: HeatRequest, open = false): Piece | null {
  const columns = heat.firstSteps.length;
  const rows = heat.firstRanks.length;
  if (columns === 0 || rows === 0) return null;
  const cells = heat.held === true ? carried(heat.cells, columns) : heat.cells;
  const whole = { ...heat, cells, lastSteps: closed(heat.firstSteps, heat.lastSteps) };
  return {
    heat: whole,
    stat,
    requested,
    open,
    grown: false,
    window: {
      step0: heat.firstSteps[0] ?? 0,
      step1: (whole.lastSteps[columns - 1] ?? 0) + 1,
      rank0: heat.firstRanks[0] ?? 0,
      rank1: (heat.lastRanks[rows - 1] ?? 0) + 1,
    },
    stepSpan: widest(heat.firstSteps, whole.lastSteps),
    rankSpan: widest(heat.firstRanks, heat.lastRanks),
  };
}

/** For very large jobs only every n-th step is kept; each covers the steps up to the next. */
function closed(first: Uint32Array, last: Uint32Array): Uint32Array {
  let every = Infinity;
  for (let at = 1; at < first.length; at += 1) every = Math.min(every, (first[at] ?? 0) - (first[at - 1] ?? 0));
  return last.map((end, at) => {
    const next = first[at + 1];
    return next !== undefined && next - (first[at] ?? 0) === every ? next - 1 : end;
  });
}

const LONGEST_CARRIED = 64;

/** Memory and devices are read only in some steps: a value is held until the next, up to a limit. */
function carried(cells: Float32Array, columns: number): Float32Array {
  const found = cells.slice();
  for (let row = 0; row < cells.length; row += columns) {
    let known = -Infinity;
    for (let at = row; at < row + columns; at += 1) {
      if (!Number.isNaN(cells[at])) known = at;
      else if (at - known <= LONGEST_CARRIED) found[at] = cells[known] ?? Number.NaN;
    }
  }
  return found;
}

function widest(first: Uint32Array, last: Uint32Array): number {
  let found = 1;
  for (let at = 0; at < first.length; at += 1) found = Math.max(found, (last[at] ?? 0) - (first[at] ?? 0) + 1);
  return found;
}

export function stretches(first: Uint32Array, last: Uint32Array): Stretch[] {
  const found: Stretch[] = [];
  for (let at = 0; at < first.length; ) {
    const from = at;
    const width = (last[at] ?? 0) - (first[at] ?? 0);
    at += 1;
    while (at < first.length && first[at] === (last[at - 1] ?? 0) + 1 && (last[at] ?? 0) - (first[at] ?? 0) === width) at += 1;
    found.push({ from, to: at, start: first[from] ?? 0, end: (last[at - 1] ?? 0) + 1 });
  }
  return found;
}

export interface Cell {
  row: number;
  column: number;
  firstRank: number;
  lastRank: number;
  firstStep: number;
  lastStep: number;
  /** NaN: unknown. */
  value: number;
}

/** The cell for a rank and step; null if the piece has none. */
export function cellOf(piece: Piece, rank: number, step: number): Cell | null {
  const { heat } = piece;
  const row = placeOf(heat.firstRanks, heat.lastRanks, rank);
  const column = placeOf(heat.firstSteps, heat.lastSteps, step);
  if (row < 0 || column < 0) return null;
  return {
    row,
    column,
    firstRank: heat.firstRanks[row] ?? 0,
    lastRank: heat.lastRanks[row] ?? 0,
    firstStep: heat.firstSteps[column] ?? 0,
    lastStep: heat.lastSteps[column] ?? 0,
    value: heat.cells[row * heat.firstSteps.length + column] ?? Number.NaN,
  };
}

function placeOf(first: Uint32Array, last: Uint32Array, wanted: number): number {
  let low = 0;
  let high = first.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (wanted < (first[middle] ?? 0)) high = middle - 1;
    else if (wanted > (last[middle] ?? 0)) low = middle + 1;
    else return middle;
  }
  return -1;
}

/** The cells within a window, row by row, and their number of columns: to compute their range. */
export function cellsWithin(piece: Piece, window: HeatWindow): [Float32Array, number] {
  const { heat } = piece;
  const columns = heat.firstSteps.length;
  const [c0, c1] = within(heat.firstSteps, heat.lastSteps, window.step0, window.step1);
  const [r0, r1] = within(heat.firstRanks, heat.lastRanks, window.rank0, window.rank1);
  if (c0 === 0 && c1 === columns) return [heat.cells.subarray(r0 * columns, r1 * columns), columns];
  const found = new Float32Array(Math.max(0, (r1 - r0) * (c1 - c0)));
  for (let row = r0; row < r1; row += 1) found.set(heat.cells.subarray(row * columns + c0, row * columns + c1), (row - r0) * (c1 - c0));
  return [found, c1 - c0];
}

function within(first: Uint32Array, last: Uint32Array, from: number, to: number): [number, number] {
  let start = 0;
  while (start < first.length && (last[start] ?? 0) < from) start += 1;
  let end = start;
  while (end < first.length && (first[end] ?? 0) < to) end += 1;
  return [start, end];
}

/** How many of the newest steps are requested again, for late ranks and for waits that are recorded later. */
const AGAIN_STEPS = 8;
const MOST_AGAIN = 64;

/** First step to request again when the run progresses: the start of a column. */
export function openFrom(piece: Piece): number {
  const { heat } = piece;
  const columns = heat.firstSteps.length;
  const rows = heat.firstRanks.length;
  let from = Math.max(0, columns - Math.max(1, Math.ceil(AGAIN_STEPS / piece.stepSpan)));
  for (let column = from - 1; column >= Math.max(0, columns - Math.ceil(MOST_AGAIN / piece.stepSpan)); column -= 1) {
    let whole = true;
    for (let row = 0; row < rows && whole; row += 1) whole = !Number.isNaN(heat.cells[row * columns + column]);
    if (!whole) from = column;
  }
  return heat.firstSteps[from] ?? 0;
}

/**
 * Append `more`, which has individual steps and starts at a column of the piece or right after the last. Null if they do not
 * fit (other ranks, or a gap); then the whole piece must be requested.
 */
export function appended(piece: Piece, more: Heat): Piece | null {
  const { heat } = piece;
  const rows = heat.firstRanks.length;
  const begin = more.firstSteps[0];
  if (begin === undefined) return piece;
  if (!equal(heat.firstRanks, more.firstRanks) || !equal(heat.lastRanks, more.lastRanks)) return null;
  const columns = heat.firstSteps.length;
  let keep = columns;
  while (keep > 0 && (heat.firstSteps[keep - 1] ?? 0) >= begin) keep -= 1;
  const before = keep === 0 ? begin : (heat.lastSteps[keep - 1] ?? 0) + 1;
  if (before < begin || (keep > 0 && (heat.lastSteps[keep - 1] ?? 0) >= begin)) return null;
  const fresh = grouped(more, piece.stepSpan, piece.stat);
  const count = keep + fresh.firstSteps.length;
  const cells = new Float32Array(rows * count);
  for (let row = 0; row < rows; row += 1) {
    cells.set(heat.cells.subarray(row * columns, row * columns + keep), row * count);
    const at = row * fresh.firstSteps.length;
    cells.set(fresh.cells.subarray(at, at + fresh.firstSteps.length), row * count + keep);
  }
  const firstSteps = together(heat.firstSteps.subarray(0, keep), fresh.firstSteps);
  const lastSteps = together(heat.lastSteps.subarray(0, keep), fresh.lastSteps);
  const joined = pieceOf({ ...heat, exact: heat.exact && more.exact, firstSteps, lastSteps, cells }, piece.stat, piece.requested, piece.open);
  return joined && { ...joined, stepSpan: Math.max(joined.stepSpan, piece.stepSpan) };
}

/** Merge into columns of `span` steps each. */
export function grouped(heat: Heat, span: number, stat: Stat): Heat {
  const columns = heat.firstSteps.length;
  const rows = heat.firstRanks.length;
  const origin = heat.firstSteps[0] ?? 0;
  const starts: number[] = [];
  for (let at = 0; at < columns; at += 1) {
    const group = Math.floor(((heat.firstSteps[at] ?? 0) - origin) / span);
    const last = starts.at(-1);
    if (last === undefined || group !== Math.floor(((heat.firstSteps[last] ?? 0) - origin) / span)) starts.push(at);
  }
  if (starts.length === columns) return heat;
  const cells = new Float32Array(rows * starts.length);
  for (let row = 0; row < rows; row += 1) {
    starts.forEach((from, group) => {
      cells[row * starts.length + group] = reduced(heat.cells, row * columns + from, row * columns + (starts[group + 1] ?? columns), stat);
    });
  }
  return {
    ...heat,
    firstSteps: Uint32Array.from(starts, (from) => heat.firstSteps[from] ?? 0),
    lastSteps: Uint32Array.from(starts, (_from, group) => heat.lastSteps[(starts[group + 1] ?? columns) - 1] ?? 0),
    cells,
  };
}

function reduced(cells: Float32Array, from: number, to: number, stat: Stat): number {
  let known = 0;
  let found = Number.NaN;
  for (let at = from; at < to; at += 1) {
    const value = cells[at] as number;
    if (Number.isNaN(value)) continue;
    found = known === 0 ? value : stat === "max" ? Math.max(found, value) : found + value;
    known += 1;
  }
  return stat === "mean" && known > 0 ? found / known : found;
}

function equal(one: Uint32Array, two: Uint32Array): boolean {
  return one.length === two.length && one.every((value, at) => value === two[at]);
}

function together(one: Uint32Array, two: Uint32Array): Uint32Array {
  const found = new Uint32Array(one.length + two.length);
  found.set(one);
  found.set(two, one.length);
  return found;
}
