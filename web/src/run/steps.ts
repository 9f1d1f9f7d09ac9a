/** Columns of steps: merged as they arrive, and read by charts. */

import type { StepsDocument } from "../api/documents";

/** Bins requested from the hub; after growing to twice as many, they are requested again. */
export const BINS = 600;

/** Append `more` to `known`; where they overlap, `more` wins. */
export function joined(known: StepsDocument, more: StepsDocument): StepsDocument {
  const from = more.first[0];
  if (from === undefined) return known;
  let keep = known.first.length;
  while (keep > 0 && (known.last[keep - 1] ?? 0) >= from) keep -= 1;
  return merged(known, more, (one, two) => [...one.slice(0, keep), ...two]);
}

/** Replace steps of `known` by those of `again`; steps inside longer bins stay. */
export function corrected(known: StepsDocument, again: StepsDocument): StepsDocument {
  const anew = new Map(again.first.map((step, at) => [step, at]));
  const places = known.first.map((first, at) => (known.last[at] === first ? (anew.get(first) ?? -1) : -1));
  return merged(known, again, (one, two) => one.map((value, at) => two[places[at] ?? -1] ?? value));
}

/** Merge column by column; a column that only one has is empty in the other. */
function merged(known: StepsDocument, more: StepsDocument, join: <T>(one: T[], two: T[]) => T[]): StepsDocument {
  const columns = <T>(one: Record<string, T[]>, two: Record<string, T[]>, none: T): Record<string, T[]> => {
    const found: Record<string, T[]> = {};
    for (const name of new Set([...Object.keys(one), ...Object.keys(two)])) {
      const before = one[name] ?? Array.from({ length: known.first.length }, () => none);
      const after = two[name] ?? Array.from({ length: more.first.length }, () => none);
      found[name] = join(before, after);
    }
    return found;
  };
  return {
    first: join(known.first, more.first),
    last: join(known.last, more.last),
    steps: join(known.steps, more.steps),
    ranks: join(known.ranks, more.ranks),
    quantiles: more.quantiles,
    ns: columns(known.ns, more.ns, known.quantiles.map(() => 0)),
    mean_ns: columns(known.mean_ns, more.mean_ns, 0),
    device_mean_ns: columns<number | null>(known.device_mean_ns, more.device_mean_ns, null),
    device_slowest_ns: join(slowestOnDevice(known), slowestOnDevice(more)),
    worst: join(known.worst, more.worst),
    start_wall_ns: join(known.start_wall_ns, more.start_wall_ns),
    memory_bytes: columns<number | null>(known.memory_bytes, more.memory_bytes, null),
  };
}

/** The phases with time on a device; empty if no device was timed. */
export function devicePhases(steps: StepsDocument): string[] {
  return Object.keys(steps.device_mean_ns).filter((name) => steps.device_mean_ns[name]?.some((value) => (value ?? 0) > 0));
}

function slowestOnDevice(steps: StepsDocument): (number | null)[] {
  return steps.device_slowest_ns ?? steps.first.map(() => null);
}

/** Short steps are timed on the device at least once in this many steps; a value is held until the next. */
const HELD_STEPS = 64;

/** Device times for every bin: the last known value. */
export function heldOnDevice(steps: StepsDocument, values: readonly (number | null)[]): number[] {
  let known = -1;
  return steps.first.map((first, at) => {
    if ((values[at] ?? null) !== null) known = at;
    return known >= 0 && first - (steps.last[known] ?? 0) < HELD_STEPS ? (values[known] ?? 0) : 0;
  });
}

/** The bins that were timed on the device, with those times instead of the host's. */
export function onDeviceClock(steps: StepsDocument): StepsDocument {
  const phases = Object.entries(steps.device_mean_ns);
  const timed = steps.first.flatMap((_, at) => (phases.some(([, values]) => (values[at] ?? null) !== null) ? [at] : []));
  const picked = <T>(values: readonly T[]): T[] => timed.map((at) => values[at] as T);
  const means = Object.fromEntries(phases.map(([name, values]) => [name, timed.map((at) => values[at] ?? 0)]));
  const wall = timed.map((_, at) => Object.values(means).reduce((sum, values) => sum + (values[at] ?? 0), 0));
  const work = wall.map((ns, at) => ns - (means["comm"]?.[at] ?? 0));
  return { ...steps, first: picked(steps.first), last: picked(steps.last), steps: picked(steps.steps), ranks: picked(steps.ranks), mean_ns: { wall, work, ...means } };
}

/** Length of a step on the device, mean over ranks. */
export function deviceWall(steps: StepsDocument): number[] {
  const phases = Object.values(steps.device_mean_ns).map((values) => heldOnDevice(steps, values));
  return steps.first.map((_, at) => phases.reduce((sum, values) => sum + (values[at] ?? 0), 0));
}

/** The same of the slowest rank. */
export function deviceSlowest(steps: StepsDocument): number[] {
  return heldOnDevice(steps, slowestOnDevice(steps));
}

/** The last step started by that time, according to the bins; null before the first. */
export function stepAt(steps: StepsDocument, wallNs: number): number | null {
  let found: number | null = null;
  for (let at = 0; at < steps.first.length; at += 1) {
    if ((steps.start_wall_ns[at] ?? Infinity) > wallNs) break;
    found = steps.first[at] ?? null;
  }
  return found;
}

export function quantile(steps: StepsDocument, name: string, wanted: number): number[] {
  const place = steps.quantiles.indexOf(wanted);
  return (steps.ns[name] ?? []).map((row) => row[place] ?? Number.NaN);
}
