/** Captures of a run (docs/api.md): a few steps of some ranks, recorded by torch.profiler while the job ran. */

import type { Severity } from "./documents";

export interface CaptureOrder {
  id: string;
  ranks: number[];
  at_step: number;
  steps: number;
  warmup: number;
  memory: boolean;
  stacks: boolean;
  shapes: boolean;
}

export interface CaptureReport {
  rank: number;
  state: "waiting" | "profiling" | "written" | "delivered" | "failed";
  problem: string;
  first_step: number;
  last_step: number;
  start_ms: number;
  stop_ms: number;
  write_ms: number;
}

export interface Difference {
  what: "operator" | "kernel" | "line" | "wait";
  name: string;
  rank: number;
  peer: number;
  extra_ns: number;
  phase: string;
  line: string;
  text: string;
}

export type CaptureState = "ordered" | "profiling" | "delivering" | "analyzing" | "done" | "failed";

export interface CaptureRecord {
  order: CaptureOrder;
  state: CaptureState;
  requested_wall_ns: number;
  done_wall_ns: number;
  reason: "request" | "finding" | "schedule" | "baseline";
  finding: string;
  by: string;
  problem: string;
  reports: CaptureReport[];
  files: string[];
  size_bytes: number;
  verdict: string;
  severity: Severity | "";
  differences: Difference[];
  /** What takes longer than in the baseline of the run. An older hub does not send it. */
  changes?: Difference[];
  /** Any JSON, read by `words/captures.ts`: `step_ms`, `usual_step_ms`, and `baseline` with `id` and `steps`. */
  figures: Record<string, unknown>;
}

export interface CapturesDocument {
  captures: CaptureRecord[];
  /** What this reader may do besides reading: `capture`. */
  may?: string[];
}
