/**
 * Evidence of any shape as readable rows: names in words, numbers with units, lists of similar records as tables, nested
 * values nested. Nothing is shown as JSON, and the amount is limited.
 */

import { cutText } from "../ui/format";
import { figureOf, nameOf } from "./names";
import { spansText } from "./ranks";

export type Shown =
  | { form: "text"; text: string }
  | { form: "list"; items: Shown[]; left: number }
  | { form: "pairs"; rows: Row[]; left: number }
  | { form: "table"; columns: string[]; rows: string[][]; left: number };

export interface Row {
  key: string;
  name: string;
  value: Shown;
}

const MOST_ROWS = 24;
const MOST_COLUMNS = 10;
const DEEPEST = 4;
const LONGEST = 2000;
const RANKS = /(^|_)(ranks?|victims|culprits|suspects|waiters|waited|members|last_most_often)$/;

export function evidenceRows(evidence: Readonly<Record<string, unknown>>, without: readonly string[] = []): Row[] {
  return Object.entries(evidence)
    .filter(([key, value]) => !without.includes(key) && !empty(value))
    .map(([key, value]) => ({ key, name: nameOf(key), value: shown(key, value, 0) }));
}

export function shown(key: string, value: unknown, depth: number): Shown {
  if (Array.isArray(value)) return listed(key, value, depth);
  if (isRecord(value)) return depth >= DEEPEST ? text("…") : nested(key, value, depth);
  return text(plain(key, value));
}

/** One value in words. */
export function plain(key: string, value: unknown): string {
  if (value === null || value === undefined) return "not known";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return figureOf(key, value);
  const said = String(value);
  return cutText(said, LONGEST);
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function listed(key: string, values: readonly unknown[], depth: number): Shown {
  if (values.every((one) => typeof one === "number") && RANKS.test(key)) return text(spansText(values as number[]));
  if (values.every((one) => !isRecord(one) && !Array.isArray(one))) {
    const some = values.slice(0, MOST_ROWS).map((one) => plain(key, one));
    const left = values.length - some.length;
    // Sentences become a list, words one line.
    if (some.some((one) => one.length > 40)) return { form: "list", items: some.map(text), left };
    return text(some.join(", ") + (left > 0 ? ` and ${left} more` : ""));
  }
  if (depth >= DEEPEST) return text("…");
  if (values.length > 1 && values.every(isRecord)) return table(values, depth);
  const items = values.slice(0, MOST_ROWS).map((one) => shown(key, one, depth + 1));
  return items.length === 1 && items[0] !== undefined ? items[0] : { form: "list", items, left: values.length - items.length };
}

function nested(key: string, value: Record<string, unknown>, depth: number): Shown {
  const place = placeText(value);
  if (place !== null) return text(place);
  const entries = Object.entries(value).filter(([, one]) => !empty(one));
  const byRank = /_by_rank$/.test(key) || (entries.length > 0 && entries.every(([name]) => /^\d+$/.test(name)));
  // Values by rank or phase have the unit of the key: `excess_ms_by_phase`.
  const whole = /_by_|^shares$|^opportunities$/.test(key);
  const rows = entries.slice(0, MOST_ROWS).map(([name, one]) => ({
    key: name,
    name: byRank ? `rank ${name}` : whole ? (name === "between" ? nameOf(name) : name) : nameOf(name),
    value: shown(whole || byRank ? key : name, one, depth + 1),
  }));
  return { form: "pairs", rows, left: entries.length - rows.length };
}

function table(values: readonly Record<string, unknown>[], depth: number): Shown {
  const keys = [...new Set(values.flatMap((one) => Object.keys(one)))].filter((key) => values.some((one) => !empty(one[key])));
  const columns = keys.slice(0, MOST_COLUMNS);
  const rows = values.slice(0, MOST_ROWS).map((one) => columns.map((key) => (empty(one[key]) ? "–" : flat(shown(key, one[key], depth + 1)))));
  return { form: "table", columns: columns.map(nameOf), rows, left: values.length - rows.length };
}

/** `train.py:41 in step` for a value with file and line; null: not a place. */
export function placeText(value: unknown): string | null {
  if (!isRecord(value) || typeof value["file"] !== "string" || typeof value["line"] !== "number") return null;
  if (Object.keys(value).some((key) => !["file", "line", "function", "text", "share", "seen", "steps"].includes(key))) return null;
  const where = `${value["file"]}${value["line"] ? `:${value["line"]}` : ""}`;
  return typeof value["function"] === "string" && value["function"] ? `${where} in ${value["function"]}` : where;
}

/** In one line, for a cell. */
export function flat(value: Shown): string {
  const more = (left: number): string => (left > 0 ? ` and ${left} more` : "");
  switch (value.form) {
    case "text":
      return value.text;
    case "list":
      return value.items.map(flat).join("; ") + more(value.left);
    case "pairs":
      return value.rows.map((row) => `${row.name} ${flat(row.value)}`).join(", ") + more(value.left);
    case "table":
      return value.rows.map((row) => row.map((cell, at) => `${value.columns[at]} ${cell}`).join(", ")).join("; ") + more(value.left);
  }
}

function text(said: string): Shown {
  return { form: "text", text: said };
}

function empty(value: unknown): boolean {
  return value === null || value === undefined || value === "" || (Array.isArray(value) && value.length === 0) || (isRecord(value) && Object.keys(value).length === 0);
}
