/** The hub's comparison of runs (docs/api.md). The hub judges and writes the texts. */

import type { RunRow, Severity } from "./documents";

/** One figure of one run; `change` is relative to the first run. */
export interface CompareCell {
  value: number;
  text: string;
  change: string | null;
  /** `alike`: within what chance can do. */
  look: "better" | "worse" | "alike" | null;
}

export interface CompareRow {
  section: string;
  name: string;
  /** One for each run; null: unknown. */
  cells: (CompareCell | null)[];
}

export interface ComparedFinding {
  kind: string;
  severity: Severity;
  title: string;
  /** Its share of the time before and after, in words. */
  price: string;
}

/** A run compared with the first one, in the words of `stepscope compare`. */
export interface Comparison {
  title: string;
  look: Severity | "healthy";
  changed: string[];
  cause: string;
  step: string[];
  basis: string;
  needed: string;
  skew: string;
  exchanges: string[];
  notices: string[];
  findings: { new: ComparedFinding[]; gone: ComparedFinding[]; kept: ComparedFinding[] } | null;
}

export interface ComparedRun extends RunRow {
  label: string;
  over: boolean;
  /** Why it cannot be compared. */
  problem: string | null;
  /** Null for the first run. */
  comparison: Comparison | null;
}

export interface CompareDocument {
  clock: "host" | "device" | null;
  runs: ComparedRun[];
  rows: CompareRow[];
  settings: { label: string; kind: string; matters: boolean; values: (string | number | boolean | null)[] }[];
}
