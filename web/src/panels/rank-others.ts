/**
 * One rank compared with the mean of all others, over the steps known for both.
 *
 * The hub returns the mean over all ranks; n times that minus this rank's time is the total of the others. So the phases of
 * the others add up to their step, and with two ranks "the others" is the other one.
 */

import type { RankDocument, StepsDocument } from "../api/documents";
import { ordered } from "../charts/palette";

type RankSteps = RankDocument["steps"];

/** The steps of a rank that were timed on its device, with those times instead of the host's. */
export function rankOnDevice(steps: RankSteps): RankSteps {
  const phases = Object.entries(steps.device_ns);
  const timed = steps.first.flatMap((_, at) => (phases.some(([, values]) => (values[at] ?? null) !== null) ? [at] : []));
  const phase_ns = Object.fromEntries(phases.map(([name, values]) => [name, timed.map((at) => values[at] ?? 0)]));
  const wall_ns = timed.map((_, at) => Object.values(phase_ns).reduce((sum, values) => sum + (values[at] ?? 0), 0));
  return { ...steps, first: timed.map((at) => steps.first[at] ?? 0), last: timed.map((at) => steps.last[at] ?? 0), wall_ns, phase_ns };
}

/** Steps shared by a bin of the rank and a bin of all ranks. */
interface Piece {
  own: number;
  all: number;
  steps: number;
}

export interface PhaseRow {
  phase: string;
  own: number;
  /** Null: no other rank has these steps. */
  others: number | null;
}

function pieces(steps: RankSteps, all: StepsDocument | null): Piece[] {
  const found: Piece[] = [];
  if (all === null) return found;
  for (let own = 0, bin = 0; own < steps.first.length && bin < all.first.length; ) {
    const [ownLast, binLast] = [steps.last[own] ?? 0, all.last[bin] ?? 0];
    const shared = Math.min(ownLast, binLast) - Math.max(steps.first[own] ?? 0, all.first[bin] ?? 0) + 1;
    if (shared > 0) found.push({ own, all: bin, steps: shared });
    if (ownLast <= binLast) own += 1;
    if (binLast <= ownLast) bin += 1;
  }
  return found;
}

/** Time of the others in each bin of all ranks; null if there are none, or this rank's time is unknown. */
function byBin(shared: readonly Piece[], own: readonly number[], all: StepsDocument, name: string): (number | null)[] {
  const sums = all.first.map(() => ({ own: 0, steps: 0 }));
  for (const piece of shared) {
    const sum = sums[piece.all];
    if (sum === undefined) continue;
    sum.own += (own[piece.own] ?? 0) * piece.steps;
    sum.steps += piece.steps;
  }
  return sums.map((sum, bin) => {
    const ranks = all.ranks[bin] ?? 0;
    if (sum.steps === 0 || ranks < 2) return null;
    return Math.max(0, (ranks * (all.mean_ns[name]?.[bin] ?? 0) - sum.own / sum.steps) / (ranks - 1));
  });
}

/** For each bin of the rank, the others' step time; null: unknown. */
export function othersWall(steps: RankSteps, all: StepsDocument | null): (number | null)[] {
  const shared = pieces(steps, all);
  const others = all === null ? [] : byBin(shared, steps.wall_ns, all, "wall");
  const sums = steps.first.map(() => ({ ns: 0, steps: 0 }));
  for (const piece of shared) {
    const [ns, sum] = [others[piece.all] ?? null, sums[piece.own]];
    if (ns === null || sum === undefined) continue;
    sum.ns += ns * piece.steps;
    sum.steps += piece.steps;
  }
  return sums.map((sum) => (sum.steps > 0 ? sum.ns / sum.steps : null));
}

/** By phase, the mean per step of the rank and of the others, over the steps known for both, if any. */
export function comparison(steps: RankSteps, all: StepsDocument | null): PhaseRow[] {
  const known = pieces(steps, all).filter((piece) => (all?.ranks[piece.all] ?? 0) > 1);
  const alone = known.length === 0;
  const over = alone ? steps.first.map((first, own) => ({ own, all: -1, steps: (steps.last[own] ?? first) - first + 1 })) : known;
  const total = over.reduce((sum, piece) => sum + piece.steps, 0);
  const rows = ["wall", ...phasesOf(steps, alone ? null : all)].map((phase): PhaseRow => {
    const values = phase === "wall" ? steps.wall_ns : (steps.phase_ns[phase] ?? []);
    const own = total > 0 ? over.reduce((sum, piece) => sum + (values[piece.own] ?? 0) * piece.steps, 0) / total : 0;
    if (alone || all === null) return { phase, own, others: null };
    let [ns, weight] = [0, 0];
    for (const piece of known) {
      const ranks = all.ranks[piece.all] ?? 0;
      ns += (ranks * (all.mean_ns[phase]?.[piece.all] ?? 0) - (values[piece.own] ?? 0)) * piece.steps;
      weight += (ranks - 1) * piece.steps;
    }
    return { phase, own, others: Math.max(0, ns / weight) };
  });
  return rows.filter(({ phase, own, others }) => phase === "wall" || own > 0 || (others ?? 0) > 0);
}

export interface StepRows {
  /** A range of several steps if they are no longer known individually. */
  first: number;
  last: number;
  rows: PhaseRow[];
}

/** The same for the selected step; the others only if their figures cover exactly these steps. Null: unknown. */
export function comparisonAt(steps: RankSteps, all: StepsDocument | null, step: number): StepRows | null {
  const at = steps.first.findIndex((first, own) => first <= step && step <= (steps.last[own] ?? first));
  const [first, last] = [steps.first[at], steps.last[at]];
  if (first === undefined || last === undefined) return null;
  const bin = all === null ? -1 : all.first.findIndex((begin, place) => begin === first && all.last[place] === last);
  const only = <T>(columns: Record<string, T[]>, place: number): Record<string, T[]> => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.slice(place, place + 1)]));
  const own: RankSteps = { ...steps, first: [first], last: [last], wall_ns: steps.wall_ns.slice(at, at + 1), phase_ns: only(steps.phase_ns, at) };
  const same = all === null || bin < 0 ? null : { ...all, first: [first], last: [last], ranks: all.ranks.slice(bin, bin + 1), mean_ns: only(all.mean_ns, bin) };
  return { first, last, rows: comparison(own, same) };
}

/** Includes phases that only the others have, so that theirs add up. */
function phasesOf(steps: RankSteps, all: StepsDocument | null): string[] {
  const names = [...Object.keys(steps.phase_ns), ...Object.keys(all?.mean_ns ?? {})];
  return ordered([...new Set(names)].filter((name) => name !== "wall" && name !== "work"));
}
