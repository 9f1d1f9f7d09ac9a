/** Maps of ranks and steps from a function. */

import type { Heat } from "../src/api/documents";
import { pieceOf, type Piece, type Stat } from "../src/charts/heat-piece";
import type { HeatWindow } from "../src/charts/heat-window";

/** `value(rank, step)` for ranks and steps in cells of `rankSpan` × `stepSpan`; the maximum of each. */
export function heatOf(window: HeatWindow, rankSpan: number, stepSpan: number, value: (rank: number, step: number) => number, exact = true): Heat {
  const starts = (from: number, to: number, span: number): number[] => Array.from({ length: Math.ceil((to - from) / span) }, (_none, at) => from + at * span);
  const [rows, columns] = [starts(window.rank0, window.rank1, rankSpan), starts(window.step0, window.step1, stepSpan)];
  const cells = new Float32Array(rows.length * columns.length).fill(Number.NaN);
  rows.forEach((rank0, row) =>
    columns.forEach((step0, column) => {
      for (let rank = rank0; rank < Math.min(rank0 + rankSpan, window.rank1); rank += 1) {
        for (let step = step0; step < Math.min(step0 + stepSpan, window.step1); step += 1) {
          const [now, next] = [cells[row * columns.length + column] ?? Number.NaN, value(rank, step)];
          if (!(now >= next)) cells[row * columns.length + column] = Number.isNaN(next) ? now : next;
        }
      }
    }),
  );
  const last = (starts_: number[], span: number, end: number): Uint32Array => Uint32Array.from(starts_, (start) => Math.min(start + span, end) - 1);
  return {
    unit: "ns",
    exact,
    knownFrom: window.step0,
    firstRanks: Uint32Array.from(rows),
    lastRanks: last(rows, rankSpan, window.rank1),
    firstSteps: Uint32Array.from(columns),
    lastSteps: last(columns, stepSpan, window.step1),
    cells,
  };
}

export function piece(window: HeatWindow, rankSpan: number, stepSpan: number, value: (rank: number, step: number) => number, stat: Stat = "max"): Piece {
  const found = pieceOf(heatOf(window, rankSpan, stepSpan, value), stat, { window, rankSpan, stepSpan }, true);
  if (found === null) throw new Error("no cells");
  return found;
}
