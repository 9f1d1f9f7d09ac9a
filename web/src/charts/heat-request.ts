/** Request for a part of the map: no more cells than pixels, slightly beyond the edges, aligned to a fixed grid. */

import type { Params } from "../api/source";
import type { HeatRequest, Piece } from "./heat-piece";
import type { HeatWindow } from "./heat-window";

/** The hub's limits (docs/api.md, "heat"). */
const MOST_CELLS = 1 << 20;
const MOST_ROWS = 2048;
const MOST_COLUMNS = 4096;
/** Margin beyond each edge, so that a short move needs no request. */
const BEYOND = 0.15;
/** Cells narrower than a pixel would be lost when drawn. */
const LEAST_PIXELS = 0.999;

export interface Pixels {
  width: number;
  height: number;
}

/** The request for the visible part of `all` at this pixel size. */
export function questionFor(seen: HeatWindow, all: HeatWindow, pixels: Pixels): HeatRequest {
  const steps = beyond(seen.step0, seen.step1, all.step0, all.step1);
  const ranks = beyond(seen.rank0, seen.rank1, all.rank0, all.rank1);
  let width = Math.max(1, pixels.width);
  let height = Math.max(1, pixels.height);
  for (;;) {
    const stepSpan = Math.max(1, Math.ceil((seen.step1 - seen.step0) / width), Math.ceil((steps[1] - steps[0]) / MOST_COLUMNS));
    const rankSpan = Math.max(1, Math.ceil((seen.rank1 - seen.rank0) / height), Math.ceil((ranks[1] - ranks[0]) / MOST_ROWS));
    const [step0, step1] = cut(steps, stepSpan, all.step1);
    const [rank0, rank1] = cut(ranks, rankSpan, all.rank1);
    const requested = { window: { step0, step1, rank0, rank1 }, stepSpan, rankSpan };
    const { rows, columns } = shapeOf(requested);
    if (rows * columns <= MOST_CELLS && rows <= MOST_ROWS && columns <= MOST_COLUMNS) return requested;
    width *= 0.9;
    height *= 0.9;
  }
}

export function shapeOf({ window, stepSpan, rankSpan }: HeatRequest): { rows: number; columns: number } {
  return { rows: Math.ceil((window.rank1 - window.rank0) / rankSpan), columns: Math.ceil((window.step1 - window.step0) / stepSpan) };
}

export function paramsOf(requested: HeatRequest, value: string, stat: string): Params {
  const { window } = requested;
  const { rows, columns } = shapeOf(requested);
  return {
    value,
    stat,
    first: window.step0,
    last: window.step1 - 1,
    ranks: `${window.rank0}-${window.rank1 - 1}`,
    rank_bins: rows,
    step_bins: columns,
  };
}

/** Whether a piece shows that window as well as the hub could at this pixel size. */
export function serves(piece: Piece, seen: HeatWindow, pixels: Pixels): boolean {
  const { requested } = piece;
  const covers =
    requested.window.step0 <= seen.step0 && requested.window.step1 >= seen.step1 && requested.window.rank0 <= seen.rank0 && requested.window.rank1 >= seen.rank1;
  if (!covers) return false;
  const stepPixels = (pixels.width / (seen.step1 - seen.step0)) * piece.stepSpan;
  const rankPixels = (pixels.height / (seen.rank1 - seen.rank0)) * piece.rankSpan;
  if (stepPixels < LEAST_PIXELS || rankPixels < LEAST_PIXELS) return false;
  const wanted = questionFor(seen, requested.window, pixels);
  return requested.stepSpan <= wanted.stepSpan && requested.rankSpan <= wanted.rankSpan;
}

function beyond(from: number, to: number, least: number, most: number): [number, number] {
  const more = (to - from) * BEYOND;
  return [Math.max(least, Math.floor(from - more)), Math.min(most, Math.ceil(to + more))];
}

function cut([from, to]: [number, number], span: number, most: number): [number, number] {
  return [Math.floor(from / span) * span, Math.min(Math.ceil(to / span) * span, Math.max(most, to))];
}
