/** The fleet document: what all runs lost, to what, and on which host. The hub writes all text in it. */

/** Hours of ranks: on GPUs GPU hours. By cause. */
export type Hours = Record<string, number>;

/** What a row leads to: the most important runs, and how many there are. */
export interface Behind {
  run_count: number;
  runs: string[];
}

export interface CauseRow extends Behind {
  cause: string;
  name: string;
  gpu_hours: number;
  share: number | null;
}

export interface PeriodRow extends Behind {
  begin_wall_ns: number;
  gpu_hours: number;
  by_cause: Hours;
}

export interface ShareRow extends Behind {
  key: string;
  name: string;
  gpu_hours: number;
  useful_share: number | null;
  by_cause: Hours;
}

export interface FleetHost extends Behind {
  host: string;
  suspect: boolean;
  kind: string;
  title: string;
  compared_runs: number;
  slow_runs: number;
  expected_slow_runs: number | null;
  slowdown_share: number | null;
  slowdown_low_share: number | null;
  slowdown_high_share: number | null;
  phase: string | null;
  confidence: number | null;
  gpu_hours_lost: number | null;
  last_slow_wall_ns: number | null;
}

export interface FleetPair extends Behind {
  hosts: string[];
  kind: string;
  title: string;
  compared_runs: number;
  slow_runs: number;
  expected_slow_runs: number | null;
  exchange_ratio: number | null;
  confidence: number | null;
  gpu_hours_lost: number | null;
}

export interface GpuEvent extends Behind {
  host: string;
  gpu_uuid: string | null;
  gpu_index: number | null;
  gpu_name: string | null;
  kind: string;
  reasons: string[];
  title: string;
  throttled_share: number | null;
  first_wall_ns: number | null;
  last_wall_ns: number | null;
}

export interface FleetChange extends Behind {
  wall_ns: number;
  title: string;
  direction: "slower" | "faster";
  change_share: number | null;
  low_share: number | null;
  high_share: number | null;
  jobs: number;
  changed_jobs: number;
  confidence: number | null;
  phase: string | null;
  what: { name: string; before: string | null; after: string | null; jobs: number }[];
  gpu_hours_lost: number | null;
}

export interface FleetDocument {
  since_wall_ns: number | null;
  first_wall_ns: number | null;
  last_wall_ns: number | null;
  problems: string[];
  totals: {
    runs: number;
    active_runs: number;
    unread_runs: number;
    jobs: number;
    hosts: number;
    gpus: number | null;
    users: number | null;
    gpu_hours: number;
    useful_share: number | null;
    lost_gpu_hours: number;
    headline: string;
  };
  causes: CauseRow[];
  over_time: { unit: "day" | "week" | "month" | "year" | "decade"; rows: PeriodRow[] };
  by_job: ShareRow[];
  by_team: ShareRow[];
  by_user: ShareRow[];
  by_host: ShareRow[];
  hosts: FleetHost[];
  links: FleetPair[];
  gpu_events: GpuEvent[];
  changes: FleetChange[];
}
