/** Incidents as the hub serves them (docs/incidents.md). */

import type { Severity } from "./documents";
import type { Chart, Row } from "./text-documents";

export interface SourceText {
  text: string;
  file?: string;
  line?: number;
}

/** A sentence and where it comes from; `wall_ns`: the moment that it is about. */
export interface Statement {
  text: string;
  source: SourceText;
  wall_ns?: number | null;
  step?: number | null;
}

export interface IncidentRow {
  number: number;
  topic: string;
  state: "open" | "acknowledged" | "resolved";
  state_text: string;
  kind: string;
  kind_text: string;
  severity: Severity;
  title: string;
  ranks: number[];
  hosts: string[];
  since_step: number | null;
  since_wall_ns: number | null;
  resolved_wall_ns: number | null;
  cost_text: string;
  source?: SourceText;
}

export interface IncidentsDocument {
  made_from: string;
  notice: string;
  incidents: IncidentRow[];
  /** What this reader may do: `acknowledge`, `silence`. */
  may?: string[];
}

export interface LineChart {
  title: string;
  x: string;
  at: number[];
  /** Where on `at` the incident began; missing: at 0. */
  onset?: number;
  series: { name: string; values: number[] }[];
  low: number;
  high: number;
  low_text: string;
  high_text: string;
  source: SourceText;
}

export interface LogPiece {
  rank: number | null;
  file: string;
  first_line: number | null;
  before: number;
  lines: string[];
  text: string;
  source: SourceText;
}

export interface IncidentDocument {
  run: { name: string; over: boolean; status_text: string };
  count: number;
  notice: string;
  incident: IncidentRow;
  finding?: { statements: Statement[]; facts: string[]; price: string[]; time_left: number | null; confidence: string | null; charts: Chart[]; evidence: Row[]; advice: Statement[]; source: SourceText };
  onset?: { step: number | null; ranks: number[]; statements: Statement[] };
  impact?: { statements: Statement[] };
  errors?: { errors: { rank: number | null; text: string; traceback: string[]; source: SourceText }[]; left_out: number };
  logs?: { statements: Statement[]; pieces: LogPiece[] };
  samples?: { statements: Statement[]; changes: { who: string; label: string; before_text: string; after_text: string; score: number; source: SourceText }[]; charts: LineChart[] };
  stacks?: { hangs: { statements: Statement[]; groups: { who: string; frames: string[]; source: SourceText }[] }[]; places: (Statement & { frames: string[] })[] };
  captures?: { statements: Statement[] };
  changes?: {
    run?: string;
    statements: Statement[];
    rows?: { kind: string; label: string; before: string; after: string; source: SourceText }[];
    git?: { statements: Statement[]; commits: (Statement & { author: string })[]; files: Statement[]; commits_left_out?: number; files_left_out?: number };
  };
  earlier?: { statements: Statement[]; incidents: { run: string; number: number; title: string; severity: Severity; wall_ns: number; same: string[]; source: SourceText }[] };
  timeline?: (Statement & { what: string; severity: Severity })[];
  shortened?: boolean;
  may?: string[];
}
