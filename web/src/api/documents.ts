/** The hub's documents (docs/api.md). Times are in nanoseconds, wall clocks in nanoseconds since 1970, memory in bytes. */

import type { FindingText, Look, Row, SummaryText } from "./text-documents";

export type Severity = "critical" | "warning" | "info";

export interface RunRow {
  id: string;
  name: string;
  created_wall_ns: number;
  status: string;
  /** How it ended, in the words of the summary. */
  status_text: string;
  status_severity: Severity;
  ranks: number | null;
  steps: number | null;
  median_step_ms: number | null;
  verdict: string | null;
  severity?: Severity | null;
  /** The share of the step time that the verdict costs. This and what follows is missing from older hubs and copies. */
  cost_share?: number | null;
  /** Null while it is active. */
  duration_s?: number | null;
  host?: string;
  /** Who started it. */
  user?: string;
  command?: string[];
  commit?: string;
  branch?: string;
  dirty?: boolean;
  /** The last value of each number that the script noted. */
  metrics?: Record<string, number>;
  tags?: string[];
  note?: string;
  /** Where the run is, in a hub of several folders. */
  folder?: string | null;
}

export interface Verdict {
  kind: string;
  severity: Severity;
  look: Look;
  title: string;
  price: string | null;
  ranks: number[];
  phase: string | null;
  advice: string[];
  confidence: number;
}

export interface Cost {
  share: number;
}

export interface Finding {
  kind: string;
  severity: Severity;
  title: string;
  ranks: number[];
  phase: string | null;
  steps: [number, number] | null;
  cost: Cost | null;
  evidence: Record<string, unknown>;
  advice: string[];
  confidence: number;
  text: FindingText;
}

export interface FindingsDocument {
  live: boolean;
  verdict: Verdict | null;
  findings: Finding[];
  /** Without findings: a headline and a sentence. */
  nothing?: [string, string];
  /** `text`: on which steps and ranks the findings of an active run are based. */
  judged?: { text: string };
}

export interface Status {
  status: string;
  /** As in the list of runs. */
  status_text: string;
  status_severity: Severity;
  over: boolean;
  /** Whether its hub is about to shut down with it. */
  leaving?: boolean;
  /** When it ended; null until known, missing in older copies. */
  ended_wall_ns?: number | null;
  attempt: number;
  world_size: number;
  ranks: number;
  live_ranks: number;
  /** How many live ranks are hung. */
  hung_ranks: number;
  /** First and last of the steps in which the job hangs; null: it makes progress, or is over. */
  hung_steps: [number, number] | null;
  /** `7 of 8 ranks hung`. */
  ranks_text: string;
  states: Record<string, number>;
  step: number;
  newest_step: number;
  /** The number of that step in the framework's logs; null: the same, or not known; missing from older hubs and copies. */
  logged_step?: number | null;
  phases: string[];
  /** The clock of the findings; missing from older hubs and copies. */
  clock?: "host" | "device";
}

export interface RunContext {
  name: string | null;
  command: string[] | null;
  cwd: string | null;
  created_wall_ns: number | null;
  host: string | null;
  user: string | null;
  python: string | null;
  executable: string | null;
  platform: string | null;
  stepscope: string | null;
  environment: Record<string, string> | null;
  git: Record<string, unknown> | null;
  end: { wall_ns: number } | null;
  /** How it ended; empty: not known. */
  end_text: string;
}

export interface RunDocument extends Status {
  id: string;
  name: string;
  /** The name of its folder, to show; missing from older hubs and copies. */
  label?: string;
  folder?: string | null;
  /** The command that shows the run again if its hub ends with it. */
  reopen?: string | null;
  /** Whether the hub still reads the earlier steps of a long run, and has only the last ones. */
  reading?: boolean;
  context: RunContext;
  verdict: Verdict | null;
  info: Record<string, unknown>;
}

/** One of the ranks that worked longest in a bin; the other keys are phases. */
export interface WorstRank {
  rank: number;
  step: number;
  wall: number;
  work: number;
  [phase: string]: number;
}

/** Columns: entry i of each is bin i. */
export interface StepsDocument {
  attempt?: number;
  first: number[];
  last: number[];
  steps: number[];
  ranks: number[];
  quantiles: number[];
  /** By `wall`, `work` and phase: a row of quantiles per bin. */
  ns: Record<string, number[][]>;
  /** By `wall`, `work` and phase: the mean over ranks and the steps of the bin. The phases add up to `wall`. */
  mean_ns: Record<string, number[]>;
  /** By phase, on the device: mean over the timed ranks and steps, null if there are none. Empty if no device is timed. */
  device_mean_ns: Record<string, (number | null)[]>;
  /** The longest step of a rank on its device, of the same steps; missing in older copies. */
  device_slowest_ns?: (number | null)[];
  worst: WorstRank[][];
  start_wall_ns: number[];
  memory_bytes: Record<string, (number | null)[]>;
}

export interface RanksDocument {
  total: number;
  start: number;
  order: string;
  rank: number[];
  host: string[];
  node: string[];
  pid: number[];
  local_rank: number[];
  state: string[];
  /** What the rank is doing while the job is hung. */
  hang_state: (string | null)[];
  last_step: number[];
  live_step: number[];
  live_phase: (string | null)[];
  live_since_wall_ns: number[];
  ended_wall_ns: (number | null)[];
  lost: number[];
  mean_ns: Record<string, number[]>;
  /** The same on the devices; empty if they are not timed, missing in older copies. */
  device_mean_ns?: Record<string, number[]>;
}

export interface RankDocument {
  rank: number;
  attempt: number;
  identity: Record<string, unknown>;
  now: Record<string, unknown>;
  mean_ns: Record<string, number>;
  /** How it ended, or its state. */
  state_text: string;
  facts: Record<string, unknown>;
  /** The same in words, by object. */
  facts_text: { title: string; rows: Row[] }[];
  log: string | null;
  error: string | null;
  steps: {
    first: number[];
    last: number[];
    wall_ns: number[];
    phase_ns: Record<string, number[]>;
    device_ns: Record<string, (number | null)[]>;
    memory_bytes: Record<string, (number | null)[]>;
    start_wall_ns: number[];
    flags: number[];
  };
  past: { first: number[]; last: number[]; wall_ns: number[]; work_ns: number[] };
}

/** Numbers that the script noted; `step` is the first of each bin. */
export interface MetricsDocument {
  metrics: { name: string; step: number[]; value: number[] }[];
  left_out: number;
}

export interface SampleSeries {
  node: string;
  host?: string;
  rank?: number;
  pid?: number;
  index?: number;
  uuid?: string;
  name?: string;
  peer?: string;
  values: Record<string, (number | null)[]>;
}

export interface SamplesDocument {
  kind: string;
  stat: string;
  wall_ns: number[];
  bin_ns: number;
  series: SampleSeries[];
  left_out: number;
}

export interface RunEvent {
  number: number;
  node: string;
  wall_ns: number;
  event: string;
  text: string;
  severity: Severity;
  /** Its name in the filter. */
  category: string;
  /** How the sentence continues after several ranks; only for starts and ends of ranks. */
  text_of_ranks?: string;
  rank?: number;
  [more: string]: unknown;
}

export interface EventsDocument {
  total: number;
  next: number;
  events: RunEvent[];
}

export interface CollectiveOp {
  op: string;
  count: number;
  bytes: number | null;
  exposed_ms: number | null;
  overlapped_ms: number | null;
  /** These five are missing in recordings of earlier versions. */
  device?: boolean;
  transfer_ms?: number | null;
  wait_ms?: number | null;
  algorithm_bytes_per_s?: number | null;
  bus_bytes_per_s?: number | null;
  [more: string]: unknown;
}

export interface CollectiveGroup {
  name: string;
  kind: string;
  description: string;
  backend: string;
  size: number;
  ranks: number[];
  timed: boolean;
  ops: CollectiveOp[];
  arrivals: unknown;
}

export interface CollectivesDocument {
  /** How they were measured on the device; empty: they were not. */
  measured_text: string;
  groups: CollectiveGroup[];
  groups_left_out: number;
}

export interface SummaryDocument {
  live: boolean;
  summary: Record<string, unknown>;
  text: SummaryText;
}

/** The rank × step map: `cells[row * columns + column]`, NaN: unknown. */
export interface Heat {
  unit: "ns" | "bytes";
  exact: boolean;
  /** Known for some steps only; a value is held until the next. */
  held?: boolean;
  /** The first step for which the hub has this value, independent of the request. */
  knownFrom: number;
  firstRanks: Uint32Array;
  lastRanks: Uint32Array;
  firstSteps: Uint32Array;
  lastSteps: Uint32Array;
  cells: Float32Array;
}

/** A piece of a file of the run. */
export interface FilePiece {
  text: string;
  /** The bytes of the text, if known: a piece may begin and end within a character. */
  data?: Uint8Array;
  offset: number;
  size: number;
}
