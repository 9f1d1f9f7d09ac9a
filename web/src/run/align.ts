/**
 * Maps wall clock time to steps and back.
 *
 * Each bin has the start time of its first step. Times in between are interpolated; the last bin ends after the duration of
 * its steps. Clocks may be set back: a bin that starts before its predecessor is assumed to start with it, so that a later
 * time is never an earlier step. There is no step before the first and after the last.
 */

import type { StepsDocument } from "../api/documents";

export class StepClock {
  private readonly walls: number[] = [];
  private readonly steps: number[] = [];

  constructor(columns: Pick<StepsDocument, "first" | "last" | "steps" | "start_wall_ns" | "mean_ns">) {
    for (let at = 0; at < columns.first.length; at += 1) this.put(columns.start_wall_ns[at], columns.first[at]);
    const end = columns.first.length - 1;
    const began = columns.start_wall_ns[end];
    if (began === undefined || began === null || began <= 0) return;
    const took = (columns.mean_ns["wall"]?.[end] ?? 0) * Math.max(1, columns.steps[end] ?? 1);
    this.put(began + Math.max(1, took), (columns.last[end] ?? 0) + 1);
  }

  /** The step at a time, with its elapsed fraction; null before the first and after the last. */
  step(wallNs: number): number | null {
    return between(this.walls, this.steps, wallNs);
  }

  /** Start of a step on the hub's clock. */
  wall(step: number): number | null {
    return between(this.steps, this.walls, step);
  }

  /** From the start of the first step to the end of the last; null if there are no steps. */
  get span(): [number, number] | null {
    const [first, last] = [this.walls[0], this.walls.at(-1)];
    return first === undefined || last === undefined || this.walls.length < 2 ? null : [first, last];
  }

  private put(wall: number | null | undefined, step: number | undefined): void {
    if (wall === null || wall === undefined || !(wall > 0) || step === undefined) return;
    const [lastWall, lastStep] = [this.walls.at(-1) ?? -Infinity, this.steps.at(-1) ?? -Infinity];
    if (step <= lastStep) return;
    if (wall <= lastWall) {
      // Two steps at one time would be ambiguous: skip the later bin.
      return;
    }
    this.walls.push(wall);
    this.steps.push(step);
  }
}

function between(xs: readonly number[], ys: readonly number[], x: number): number | null {
  const end = xs.length - 1;
  if (end < 1 || !(x >= (xs[0] ?? 0)) || x > (xs[end] ?? 0)) return null;
  let [low, high] = [0, end];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if ((xs[middle] ?? 0) <= x) low = middle;
    else high = middle;
  }
  const [x0, x1, y0, y1] = [xs[low] ?? 0, xs[high] ?? 0, ys[low] ?? 0, ys[high] ?? 0];
  return y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
}

type Values = (number | null)[];

/**
 * Map curves over time to steps: the middle of step s has x = s, as in all charts over steps. Points before the first and
 * after the last step are dropped, and points at which no curve has a value. `columns` are cut in the same way.
 */
export function ontoSteps(clock: StepClock, wallNs: readonly number[], columns: readonly (readonly (number | null)[])[]): { x: number[]; columns: Values[]; outside: number } {
  const x: number[] = [];
  const kept: Values[] = columns.map(() => []);
  let outside = 0;
  for (let at = 0; at < wallNs.length; at += 1) {
    if (columns.every((column) => column[at] == null)) continue;
    const step = clock.step(wallNs[at] ?? Number.NaN);
    if (step === null) {
      outside += 1;
      continue;
    }
    x.push(step - 0.5);
    columns.forEach((column, which) => kept[which]?.push(column[at] ?? null));
  }
  return { x, columns: kept, outside };
}
