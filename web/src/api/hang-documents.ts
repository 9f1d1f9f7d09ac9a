/** A hang, as returned by `/hangs` (docs/schema.md, hangs/HOST-N.json). */

export interface Place {
  file: string;
  /** 0: unknown. */
  line: number;
  function: string;
}

/** A collective in which a rank waits. */
export interface Call {
  group: string;
  description: string;
  sequence: number | null;
  op: string;
  sizes: string;
  dtypes: string;
  peer: number | null;
}

export interface ThreadStack {
  main: boolean;
  name: string;
  /** Innermost first. */
  frames: Place[];
}

export interface StackGroup {
  ranks: number[];
  threads: ThreadStack[];
  /** Stacks of the ranks' DataLoader workers, not of the ranks. */
  workers_of: boolean;
}

export interface RankThere {
  rank: number;
  pid: number;
  alive: boolean;
  step: number | null;
  phase: string;
  since_s: number;
  process_state: string;
  cpu_share: number | null;
  gil_held: boolean | null;
  waiting_in: Call | null;
  at: Place | null;
  workers: Record<string, unknown>[];
  host: string;
}

export interface Side {
  ranks: number[];
  op: string | null;
  sizes: string;
  dtypes: string;
  at: Place | null;
  frames: Place[];
}

/** The combined result of the Flight Recorders (docs/flight.md); empty if there were none. */
export interface FlightDocument {
  title: string;
  undecidable: boolean;
  culprits: number[];
  suspects: number[];
  first_divergence: { group: string; description: string; sequence: number; differs: string; ranks: number[]; call_sites: Side[] } | null;
  wait_for: { waiters: number[]; waited: number[]; group: string; description: string; sequence: number; op: string }[];
  groups: { name: string; description: string; members: number[]; ranks: Record<string, Record<"enqueued" | "started" | "completed", number | null>> }[];
  grid: { group: string; description: string; sequences: number[]; rows: [number[], string][] } | null;
  evidence: string[];
  problems: string[];
  ranks: number[];
  world: number;
}

export interface Hang {
  number: number;
  host: string;
  kind: string;
  title: string;
  declared_wall_ns: number;
  stopped_wall_ns: number;
  threshold_s: number;
  step_s: number | null;
  culprits: { rank: number; reason: string; at: Place | null }[];
  victims: number[];
  undecidable: boolean;
  collective: Call | null;
  /** The wait cycle of a deadlock: sentences, the last of which closes it. */
  cycle: string[];
  evidence: string[];
  ranks: RankThere[];
  stacks: StackGroup[];
  flight: Partial<FlightDocument>;
  over: "recovered" | "ended" | "aborted" | null;
  over_wall_ns: number | null;
  action: string;
  hosts: string[];
  parts: { host: string; number: number; kind: string; title: string }[];
  /** First and last of the steps in progress. */
  steps: [number, number] | null;
  file: string;
}

export interface HangsDocument {
  hangs: Hang[];
  unread: string[];
}
