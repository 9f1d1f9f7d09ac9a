/** A report on traces, Flight Recorder dumps, a comparison or a sweep, as written by `stepscope.reports.page.documents`: text, tables, charts. */

import { isRecord } from "./copy-bytes";
import type { FlightView, Look, Row, StacksDocument } from "./text-documents";

export interface ReportDocument extends Verdict {
  kind: "trace" | "flight" | "compare" | "sweep";
  name: string;
  facts: string[];
  /** Warnings before everything else. */
  notices: string[];
  parts: ViewPart[];
  /** False: a sweep that is still running, or was interrupted. */
  complete?: boolean;
  /** Of traces: key, title, and what to say without parts. The parts then have a view. */
  views?: [key: string, title: string, nothing: string][];
  ranks?: number[];
  /** The rank that is shown first. */
  rank?: number | null;
  /** Parts of single ranks; a hub has those of the others. */
  of_ranks?: Record<string, ViewPart[]>;
  /** Two ranks that are compared first, and what differs, by `A-B`. */
  pair?: [rank: number, peer: number] | null;
  pairs?: Record<string, ViewPart[]>;
}

export type ViewPart = Part & { view?: string };

export interface Verdict {
  verdict: ReportFinding;
  others: ReportFinding[];
  /** `… and 3 more.`: further findings. */
  more: string;
}

/** A verdict or finding. */
export interface ReportFinding {
  /** Its name; "": none. */
  kind: string;
  look: Look;
  title: string;
  facts: string[];
  price: string | null;
  /** Share of the time that would remain without it; null: unknown. */
  left: number | null;
  advice: string[];
  certainty: string | null;
  evidence: Row[];
  /** Titled lists; each item has a line of code or "". `ring`: ranks of a wait cycle. */
  sides: { title: string; ring: number[]; items: [text: string, code: string][]; more: string }[];
}

/** A text or, with more information, a pair: a number to sort by, or the text in full. */
export type Cell = string | [text: string, more: number | string | null];

export interface TableDocument {
  title: string;
  note: string;
  heads: string[];
  numeric: boolean[];
  rows: Cell[][];
  /** How many columns fit a usual window. */
  main: number;
  more: string;
  open: boolean;
}

/** `parts`: look, value and tooltip. */
export interface BarDocument {
  label: string;
  number: number;
  parts: [look: string, value: number, title: string][];
  figure: string;
}

interface ChartDocument {
  title: string;
  about: string;
  legend: [look: string, name: string][];
}

export interface BarsDocument extends ChartDocument {
  form: "bars";
  rows: BarDocument[];
}

export interface ColumnsDocument extends ChartDocument {
  form: "columns";
  axis: string;
  /** First and last number of each column. */
  numbers: [first: number, last: number][];
  values: Record<string, number[]>;
}

export interface CurvesDocument {
  form: "curves";
  title: string;
  about: string;
  unit: "bytes" | "count";
  times_ns: number[];
  lines: [name: string, values: (number | null)[]][];
}

export interface LaneDocument {
  rank: number;
  name: string;
  kind: string;
  /** Differences between neighbors, in nanoseconds; sorted by level, then start. */
  start: number[];
  dur: number[];
  /** Index into `names`; −1: several events. */
  label: number[];
  /** Index into `looks`. */
  look: number[];
  level: number[];
  count: number[];
}

export interface TimelineDocument {
  form: "timeline";
  title: string;
  about: string;
  note: string;
  length_ns: number;
  looks: [look: string, name: string][];
  names: string[];
  marks: [at: number, name: string][];
  lanes: LaneDocument[];
}

export interface FlightPart {
  form: "flight";
  title: string;
  flight: FlightView;
}

export interface StacksPart {
  form: "stacks";
  title: string;
  stacks: StacksDocument;
}

/** A variant of a sweep. `ns`: of a step or, where variants process other amounts, of a sample. */
export interface FrontPoint {
  name: string;
  memory: number;
  ns: number;
  interval_ns: [low: number, high: number];
  place: "front" | "near" | "dominated" | "none";
  facts: [name: string, value: string][];
  /** The ID of a run of this hub. */
  run: string | null;
}

export interface FrontDocument {
  form: "front";
  title: string;
  about: string;
  /** The same in sentences. */
  label: string;
  across: string;
  up: string;
  /** By memory. */
  points: FrontPoint[];
  failed: [name: string, reason: string][];
}

export type Part =
  | ({ form: "finding"; title: string } & Verdict)
  | { form: "tables"; title: string; about: string; tables: TableDocument[] }
  | { form: "list"; title: string; items: string[]; more: string }
  | BarsDocument
  | ColumnsDocument
  | CurvesDocument
  | TimelineDocument
  | FrontDocument
  | FlightPart
  | StacksPart;

/** The report in the data of a file; null: it is a copy of a run. */
export function reportIn(json: Readonly<Record<string, unknown>>): ReportDocument | null {
  const found = json["report"];
  return isRecord(found) && isRecord(found["verdict"]) && Array.isArray(found["parts"]) ? (found as unknown as ReportDocument) : null;
}
