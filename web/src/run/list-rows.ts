/** Filter and sort the list of runs. */

import { MOST_COMPARED } from "../address";
import type { RunRow } from "../api/documents";

export const COLUMNS = [
  ...(["name", "status", "created_wall_ns", "duration_s", "ranks", "steps", "median_step_ms"] as const),
  ...(["cost_share", "commit", "verdict"] as const),
] as const;
export type Column = (typeof COLUMNS)[number];

export interface ListView {
  search: string;
  /** Empty: all. */
  status: string;
  /** Empty: all. */
  tag: string;
  /** Who started them; empty: all. */
  user: string;
  /** Only these runs; empty: all. */
  runs: readonly string[];
  /** What these runs are. */
  about: string;
  column: Column;
  down: boolean;
}

export const NEWEST: ListView = { search: "", status: "", tag: "", user: "", runs: [], about: "", column: "created_wall_ns", down: true };

/** Runs that an address can name. */
const MOST_RUNS = 200;

/** Default order: text ascending, numbers descending. */
export function sortedBy(column: Column): Pick<ListView, "column" | "down"> {
  return { column, down: !["name", "status", "commit", "verdict"].includes(column) };
}

/** The view in an address: what differs from the newest runs first. Invalid parts are ignored. */
export function readView(query: string): ListView {
  const params = new URLSearchParams(query);
  const column = COLUMNS.find((one) => one === params.get("sort")) ?? NEWEST.column;
  const turned = params.get("order") === "reverse";
  const [search = "", status = "", tag = "", user = "", about = ""] = ["q", "status", "tag", "user", "about"].map((name) => (params.get(name) ?? "").slice(0, 200));
  const runs = params.getAll("run").slice(0, MOST_RUNS).map((id) => id.slice(0, 300));
  return { search, status, tag, user, runs, about, column, down: sortedBy(column).down !== turned };
}

export function writeView(view: ListView): string {
  const params = new URLSearchParams();
  const pairs: [string, string][] = [["q", view.search], ["status", view.status], ["tag", view.tag], ["user", view.user], ["about", view.about]];
  if (view.column !== NEWEST.column) pairs.push(["sort", view.column]);
  if (view.down !== sortedBy(view.column).down) pairs.push(["order", "reverse"]);
  for (const [name, value] of pairs) if (value !== "") params.set(name, value);
  for (const id of view.runs.slice(0, MOST_RUNS)) params.append("run", id);
  return params.toString();
}

/** Rows that contain all search words in anything that the list shows; rows without a value in the sort column come last. */
export function chosenRows(rows: readonly RunRow[], view: ListView): RunRow[] {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = view.runs.length > 0 ? new Set(view.runs) : null;
  const found = rows.filter((row) => {
    if (wanted !== null && !wanted.has(row.id)) return false;
    if (view.user !== "" && row.user !== view.user) return false;
    if (view.status !== "" && row.status_text !== view.status) return false;
    if (view.tag !== "" && !(row.tags ?? []).includes(view.tag)) return false;
    const about = [row.name, row.id, row.status_text, row.verdict, row.note, row.host, row.user, row.commit, row.folder];
    const text = [...about.map((one) => one ?? ""), ...(row.tags ?? []), (row.command ?? []).join(" ")].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const sign = view.down ? -1 : 1;
  return found.sort((one, two) => order(cell(one, view.column), cell(two, view.column), sign) || two.created_wall_ns - one.created_wall_ns);
}

/** Number of runs per status, most frequent first. */
export function statuses(rows: readonly RunRow[]): [string, number][] {
  const found = new Map<string, number>();
  for (const row of rows) found.set(row.status_text, (found.get(row.status_text) ?? 0) + 1);
  return [...found].sort((one, two) => two[1] - one[1] || (one[0] < two[0] ? -1 : 1));
}

/** Number of runs per tag, by name. */
export function tagsOf(rows: readonly RunRow[]): [string, number][] {
  const found = new Map<string, number>();
  for (const tag of rows.flatMap((row) => row.tags ?? [])) found.set(tag, (found.get(tag) ?? 0) + 1);
  return [...found].sort((one, two) => names.compare(one[0], two[0]));
}

/** Number of runs per user, the reader first, then by name. */
export function usersOf(rows: readonly RunRow[], me: string): [string, number][] {
  const found = new Map<string, number>();
  for (const { user } of rows) if (user) found.set(user, (found.get(user) ?? 0) + 1);
  return [...found].sort((one, two) => Number(two[0] === me) - Number(one[0] === me) || names.compare(one[0], two[0]));
}

/** The runs that are over of the command, with the same number of ranks, that has most of them; newest first. */
export function mostFrequentJob(rows: readonly RunRow[]): RunRow[] {
  const jobs = new Map<string, RunRow[]>();
  for (const row of rows) {
    if (row.status === "running" || row.status === "unfinished" || row.median_step_ms === null) continue;
    const key = JSON.stringify([row.command, row.ranks]);
    jobs.set(key, [...(jobs.get(key) ?? []), row]);
  }
  const most = [...jobs.values()].reduce<RunRow[]>((best, job) => (job.length > best.length ? job : best), []);
  return most.sort((one, two) => two.created_wall_ns - one.created_wall_ns);
}

/** The numbers to show in a row: at most two, a loss and a throughput first. */
export function shownMetrics(row: RunRow): [string, number][] {
  const rank = (name: string): number => (/loss/i.test(name) ? 0 : /throughput|per_s|per_sec|\/s|tps/i.test(name) ? 1 : 2);
  return Object.entries(row.metrics ?? {}).sort((one, two) => rank(one[0]) - rank(two[0])).slice(0, 2);
}

/**
 * The refreshed newest runs, followed by the known older ones. Null if the count does not match the hub's: older runs were
 * added or removed, and the whole list must be loaded.
 */
export function withNewest(known: readonly RunRow[], newest: readonly RunRow[], total: number): RunRow[] | null {
  const fresh = new Set(newest.map((row) => row.id));
  const rows = [...newest, ...known.filter((row) => !fresh.has(row.id))];
  return rows.length === total ? rows : null;
}

/** Runs selected for comparison, in the order of selection: the first is the baseline. Beyond the most, the last is replaced. */
export function toggled(chosen: readonly string[], id: string): string[] {
  return chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen.slice(0, MOST_COMPARED - 1), id];
}

function cell(row: RunRow, column: Column): string | number | null {
  return column === "status" ? row.status_text : (row[column] ?? null);
}

const names = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

function order(one: string | number | null, two: string | number | null, sign: number): number {
  const [noOne, noTwo] = [one === null || one === "", two === null || two === ""];
  if (noOne || noTwo) return Number(noOne) - Number(noTwo);
  return sign * (typeof one === "string" ? names.compare(one, String(two)) : Number(one) - Number(two));
}
