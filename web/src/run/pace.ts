/** Progress and speed of a run, from the known steps. */

import type { Status, StepsDocument } from "../api/documents";

/** The newest step completed by any rank; -1: none yet. The status alone is only sent when it changes. */
export function newestStep(status: Status | null, steps: StepsDocument | null): number {
  return Math.max(status?.newest_step ?? -1, steps?.last.at(-1) ?? -1);
}

/** Steps per second over the last few bins, by the ranks' clock; null if there are too few. */
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

/** The same, but null if no new steps arrive: the ranks ended, or the job hangs. */
export function paceNow(steps: StepsDocument | null, quietMs: number | null): number | null {
  const pace = stepsPerSecond(steps);
  return pace === null || (quietMs !== null && quietMs > Math.max(LEAST_QUIET_MS, (QUIET_TIMES * 1000) / pace)) ? null : pace;
}

const LEAST_STALL_MS = 10_000;
/** After this multiple of the step time it is a stall, not only a slow step. */
const STALL_TIMES = 10;

/**
 * How long no step has ended, if that is much longer than a step takes; null: steps arrive.
 *
 * `quietMs`: time since steps last arrived, null if none did since the page was opened. Only then the clocks are compared,
 * since ours may differ from the ranks'.
 */
export function stalledMs(steps: StepsDocument | null, quietMs: number | null, nowMs: number, createdNs: number | null): number | null {
  const ended = lastStepEndNs(steps);
  if (ended === null) return null;
  const limit = Math.max(LEAST_STALL_MS, STALL_TIMES * (1000 / (stepsPerSecond(steps) ?? Infinity)));
  const idle = quietMs ?? nowMs - Math.max(ended, createdNs ?? 0) / 1e6;
  return idle > limit ? idle : null;
}

/** Approximate end of the newest known step: its start plus the time of the slowest rank. */
export function lastStepEndNs(steps: StepsDocument | null): number | null {
  const start = steps?.start_wall_ns.at(-1);
  if (steps === null || start === undefined) return null;
  return start + (steps.ns["wall"]?.at(-1)?.at(-1) ?? 0);
}
