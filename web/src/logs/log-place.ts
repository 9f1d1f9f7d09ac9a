/** Position in a rank's log at a point in time, from the log size that the agent records every second (`log_bytes`). */

import type { SampleSeries, SamplesDocument } from "../api/documents";

export interface Mark {
  wallNs: number;
  bytes: number;
}

/** The recorded sizes for one process, in order of time. */
export function marksOf(samples: SamplesDocument, rank: number, pid: number | null): Mark[] {
  const own = (one: SampleSeries): boolean => one.rank === rank && (pid === null || one.pid === pid);
  const values = samples.series.find(own)?.values["log_bytes"] ?? [];
  return values.flatMap((bytes, at) => {
    // A bin holds the last value recorded in it.
    const wallNs = samples.wall_ns[at];
    return bytes === null || wallNs === undefined ? [] : [{ wallNs: wallNs + samples.bin_ns, bytes }];
  });
}

/**
 * The log size certain at that time: the last value recorded before. The position is approximate, up to a second early, and
 * never after output printed later. Null if nothing was recorded.
 */
export function placeAt(marks: readonly Mark[], wallNs: number): number | null {
  return marks.length === 0 ? null : (marks.findLast((mark) => mark.wallNs <= wallNs)?.bytes ?? 0);
}
