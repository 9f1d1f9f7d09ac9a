/** The rank × step map inside report.html: a part of it, in the requested number of cells. */

import { damaged, isPacked, unpackTimes, type PackedMap } from "./copy-bytes";
import type { Heat } from "./documents";

export interface HeatWindow {
  ranks: [number, number];
  steps: [number, number];
  rows: number;
  columns: number;
  /** Merge cells by their mean instead of their maximum. */
  mean: boolean;
}

/** The whole map with its cells unpacked; throws a Failure if they do not match its edges. */
export function unpackMap(packed: PackedMap, blobs: Uint8Array): Heat {
  const edges = [packed.first_ranks, packed.last_ranks, packed.first_steps, packed.last_steps];
  if (!edges.every(Array.isArray) || !isPacked(packed.cells)) throw damaged("its map cannot be read");
  const cells = Float32Array.from(unpackTimes(packed.cells, blobs));
  if (cells.length !== packed.first_ranks.length * packed.first_steps.length) throw damaged("its map is truncated");
  return {
    unit: packed.unit === "bytes" ? "bytes" : "ns",
    exact: packed.exact === true,
    knownFrom: packed.first_steps[0] ?? 0,
    firstRanks: Uint32Array.from(packed.first_ranks),
    lastRanks: Uint32Array.from(packed.last_ranks),
    firstSteps: Uint32Array.from(packed.first_steps),
    lastSteps: Uint32Array.from(packed.last_steps),
    cells,
  };
}

export function cutMap(whole: Heat, { ranks, steps, rows, columns, mean }: HeatWindow): Heat {
  const down = groups(whole.firstRanks, whole.lastRanks, ranks, rows);
  const across = groups(whole.firstSteps, whole.lastSteps, steps, columns);
  const cells = new Float32Array(down.length * across.length).fill(Number.NaN);
  const wide = whole.firstSteps.length;
  down.forEach(([top, bottom], row) => {
    across.forEach(([left, right], column) => {
      let most = Number.NaN;
      let total = 0;
      let count = 0;
      for (let y = top; y < bottom; y += 1) {
        for (let x = left; x < right; x += 1) {
          const cell = whole.cells[y * wide + x] ?? Number.NaN;
          if (Number.isNaN(cell)) continue;
          if (!(most >= cell)) most = cell;
          total += cell;
          count += 1;
        }
      }
      cells[row * across.length + column] = mean && count > 0 ? total / count : most;
    });
  });
  return {
    unit: whole.unit,
    exact: whole.exact,
    knownFrom: whole.knownFrom,
    firstRanks: Uint32Array.from(down, ([top]) => whole.firstRanks[top] ?? 0),
    lastRanks: Uint32Array.from(down, ([, bottom]) => whole.lastRanks[bottom - 1] ?? 0),
    firstSteps: Uint32Array.from(across, ([left]) => whole.firstSteps[left] ?? 0),
    lastSteps: Uint32Array.from(across, ([, right]) => whole.lastSteps[right - 1] ?? 0),
    cells,
  };
}

/** Indices in the span, merged into at most `most` groups of [from, end). */
function groups(first: Uint32Array, last: Uint32Array, [low, high]: [number, number], most: number): [number, number][] {
  let from = 0;
  while (from < first.length && (last[from] ?? 0) < low) from += 1;
  let end = first.length;
  while (end > from && (first[end - 1] ?? 0) > high) end -= 1;
  const width = Math.max(1, Math.ceil((end - from) / Math.max(1, most)));
  const found: [number, number][] = [];
  for (let at = from; at < end; at += width) found.push([at, Math.min(at + width, end)]);
  return found;
}
