/** How far a run is and how fast it goes, from the steps that are known. */

import type { Status, StepsDocument } from "../api/documents";

/** The newest step that any rank made; -1: none yet. The status alone is told only when it changes. */
export function newestStep(status: Status | null, steps: StepsDocument | null): number {
  return Math.max(status?.newest_step ?? -1, steps?.last.at(-1) ?? -1);
}

/** Steps in a second over the last few bins, by the clock of the ranks; null where there are too few to say. */
export function stepsPerSecond(steps: StepsDocument | null, over = 20): number | null {
  if (steps === null) return null;
  const end = steps.first.length - 1;
  const begin = Math.max(0, end - over);
  const ns = (steps.start_wall_ns[end] ?? 0) - (steps.start_wall_ns[begin] ?? 0);
  const made = (steps.first[end] ?? 0) - (steps.first[begin] ?? 0);
  return end > begin && ns > 0 && made > 0 ? (made / ns) * 1e9 : null;
}

const LEAST_QUIET_MS = 3000;
const QUIET_TIMES = 5;

/** The same, while steps come: of a job whose ranks have ended, or that stands still, there is no pace. */
export function paceNow(steps: StepsDocument | null, quietMs: number | null): number | null {
  const pace = stepsPerSecond(steps);
  return pace === null || (quietMs !== null && quietMs > Math.max(LEAST_QUIET_MS, (QUIET_TIMES * 1000) / pace)) ? null : pace;
}

const LEAST_STALL_MS = 10_000;
/** So many times longer than a step takes, and it is no longer only a slow one. */
const STALL_TIMES = 10;

/**
 * For how long no step has ended, where that is far longer than one takes; null: they come.
 *
 * `quietMs`: since steps last came here, null when none came since the page was opened. Then only the clocks tell, and
 * ours may differ from that of the ranks: steps that come are believed before any clock.
 */
export function stalledMs(steps: StepsDocument | null, quietMs: number | null, nowMs: number, createdNs: number | null): number | null {
  const ended = lastStepEndNs(steps);
  if (ended === null) return null;
  const limit = Math.max(LEAST_STALL_MS, STALL_TIMES * (1000 / (stepsPerSecond(steps) ?? Infinity)));
  const idle = quietMs ?? nowMs - Math.max(ended, createdNs ?? 0) / 1e6;
  return idle > limit ? idle : null;
}

/** When the newest step that is known had ended, about: its start and what it took the slowest rank. */
export function lastStepEndNs(steps: StepsDocument | null): number | null {
  const start = steps?.start_wall_ns.at(-1);
  if (steps === null || start === undefined) return null;
  return start + (steps.ns["wall"]?.at(-1)?.at(-1) ?? 0);
}
