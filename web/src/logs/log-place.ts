/** Where in its log a rank was at a moment: the agent notes once a second how long the log is (`log_bytes`). */

import type { SampleSeries, SamplesDocument } from "../api/documents";

export interface Mark {
  wallNs: number;
  bytes: number;
}

/** The notes about one process, in order of time. */
export function marksOf(samples: SamplesDocument, rank: number, pid: number | null): Mark[] {
  const own = (one: SampleSeries): boolean => one.rank === rank && (pid === null || one.pid === pid);
  const values = samples.series.find(own)?.values["log_bytes"] ?? [];
  return values.flatMap((bytes, at) => {
    // A bin holds what was noted last in it.
    const wallNs = samples.wall_ns[at];
    return bytes === null || wallNs === undefined ? [] : [{ wallNs: wallNs + samples.bin_ns, bytes }];
  });
}

/**
 * How long the log surely was then: the note before. What came within the second after it may be older or younger than the
 * moment, so the place is about right, and never behind what was printed later. Null where there is no note at all.
 */
export function placeAt(marks: readonly Mark[], wallNs: number): number | null {
  return marks.length === 0 ? null : (marks.findLast((mark) => mark.wallNs <= wallNs)?.bytes ?? 0);
}
