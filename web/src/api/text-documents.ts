/** Text that the hub serves inside its documents (docs/api.md): the page draws it and adds no words. */

import type { Severity } from "./documents";

/** How a finding is marked. */
export type Look = Severity | "healthy";

/** A value of any shape in words; `left`: how many entries are left out. */
export type Shown =
  | { form: "text"; text: string }
  | { form: "time"; wall_ns: number }
  | { form: "list"; items: Shown[]; left: number }
  | { form: "pairs"; rows: Row[]; left: number }
  | { form: "table"; columns: string[]; rows: string[][]; left: number };

export interface Row {
  key: string;
  name: string;
  value: Shown;
}

export interface ChartBar {
  name: string;
  value: number;
  text: string;
  tone: "culprit" | "plain" | "good";
  /** Use the color of this phase. */
  phase: string | null;
}

/** A small chart of a finding's evidence. */
export type Chart =
  | { form: "bars"; title: string; bars: ChartBar[]; note: string; most: number | null; mark: { value: number; name: string } | null }
  | { form: "strip"; title: string; steps: number[]; first: number; last: number }
  | { form: "slope"; title: string; points: [number, number][]; end: { step: number; text: string } | null };

export interface FindingText {
  look: Look;
  /** The name of its kind. */
  kind: string;
  meaning: string;
  /** Kind, ranks, phase and steps in short. */
  facts: string[];
  confidence: string;
  /** Short phrases, such as `61% of the training time`; empty: it costs nothing worth mentioning. */
  price: string[];
  /** Share of the time that would remain without it; null: unknown. */
  time_left: number | null;
  evidence: Row[];
  charts: Chart[];
}

/** A line of code; `file`: its whole path. */
export interface Where {
  text: string;
  file: string;
}

/** Consecutive lines of user code, or of a library. */
export interface StackPiece {
  own: boolean;
  package: string;
  frames: { where: string; function: string; file: string }[];
}

export interface StackView {
  who: string;
  culprit: boolean;
  where: string;
  main: StackPiece[] | null;
  others: { name: string; pieces: StackPiece[] }[];
  threads: number;
}

export interface StacksDocument {
  groups: StackView[];
  left: number;
}

/** What the Flight Recorders show. */
export interface FlightView {
  about: string;
  divergence: { text: string; sides: { who: string; call: string; where: Where | null; odd: boolean; pieces: StackPiece[] }[] } | null;
  grid: { about: string; sequences: number[]; rows: { who: string; odd: boolean; marks: string }[]; left: number; legend: [mark: string, meaning: string][] } | null;
  waits: string[];
  waits_left: number;
  groups: { name: string; members: string; called: string; started: string; ended: string; behind: boolean }[];
  groups_left: number;
  problems: string[];
}

export interface HangPlace {
  ranks: number[];
  who: string;
  hosts: string;
  call: string;
  where: Where | null;
  steps: string;
  phases: string;
  state: string;
  cpu: string;
  /** Until the hang was declared. */
  silent_s: number;
  culprit: boolean;
  workers: string[];
}

export interface HangText {
  heading: string;
  look: Look;
  meaning: string;
  /** While it lasts with `{duration}`, which the page counts. */
  since: string;
  culprits: { rows: { ranks: number[]; reason: string; where: Where | null }[]; left: number };
  waiting: string;
  call: string;
  /** Ranks of the wait cycle, to draw it; empty: too many. */
  ring: number[];
  places: { rows: HangPlace[]; left: number };
  stacks: StacksDocument;
  flight: FlightView | null;
}

export interface GoodputPart {
  /** Key, which chooses its color. */
  part: string;
  name: string;
  seconds: number;
  text: string;
}

/** Which part of the time was useful training (docs/goodput.md). */
export interface GoodputView {
  line: string;
  parts: GoodputPart[];
  attempts: { name: string; seconds: number; text: string; parts: GoodputPart[] }[];
  /** Earlier attempts that are left out. */
  left: number;
  longest_s: number;
  notes: string[];
}

/** After a failure: whether to start the job again. */
export interface AdviceView {
  text: string;
  evidence: string[];
  command: string;
}

/** What the summary says about errors, attempts and goodput; in copies of earlier versions some are missing. */
export interface SummaryText {
  errors: { own: { text: string; title: string; type: string; traceback: string; traceback_short: string }[]; followed: string };
  attempts: string[];
  goodput?: GoodputView | null;
  advice?: AdviceView | null;
}
