/** The documents of the list of runs: the rows, what people call a run, the history of a job, and the sweeps (docs/api.md). */

import type { RunRow } from "./documents";

export interface RunsDocument {
  total: number;
  runs: RunRow[];
  /** What this reader may do besides reading. */
  may?: ("label" | "delete")[];
  /** The reader's name, by which runs of a user are compared. */
  me?: string;
}

/** What people call a run; `name` is empty if it was not renamed. */
export interface Labels {
  name: string;
  tags: string[];
  note: string;
}

export interface HistoryRun {
  id: string;
  run: string;
  name: string;
  created_wall_ns: number;
  commit: string;
  dirty: boolean;
  step_ms: number;
  interval_ms: [number, number];
}

export interface HistoryDocument {
  verdict: "slower" | "faster" | "same" | "cannot_tell";
  shape: "steady" | "steps" | "gradual" | "cannot_tell";
  changes: { run: string; change: number; interval: [number, number] }[];
  unusual: string[];
  runs: HistoryRun[];
  sentences: string[];
  command: string[];
}

/** A sweep in the list; with a `problem` it cannot be opened. */
export interface SweepRow {
  id: string;
  name: string;
  folder: string | null;
  changed_wall_ns: number;
  problem: string | null;
  title?: string;
  variants?: number;
  failed?: number;
  complete?: boolean;
}
