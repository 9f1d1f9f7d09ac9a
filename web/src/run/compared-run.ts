/** One of two runs that are compared: what is asked of it, and the figures that are laid beside the other's. */

import type { RunDocument, StepsDocument, SummaryDocument } from "../api/documents";
import type { Source } from "../api/source";
import { encoded } from "../address";
import { flattened, type Settings } from "./compare-settings";
import { eitherSpreadNs, seldom, type Pair } from "./compare";
import { BINS } from "./steps";
import { ordered } from "../charts/palette";
import { peersText } from "../words/context";

/** Steps one by one, for the spread. */
const NEWEST = 512;
const MS = 1e6;
/** A peak of memory is one figure without a spread; two that differ by less than this share are not told apart. */
const ALIKE = 0.02;

export interface ComparedRun {
  id: string;
  about: RunDocument;
  summary: Record<string, unknown>;
  steps: StepsDocument;
  newest: StepsDocument;
}

export async function askRun(source: Source, id: string, stop: AbortSignal): Promise<ComparedRun> {
  const get = <T>(resource: string, params = {}): Promise<T> => source.get<T>(`runs/${encoded(id)}${resource}`, params, stop);
  const [about, summary, steps] = await Promise.all([
    get<RunDocument>(""),
    get<SummaryDocument>("/summary"),
    get<StepsDocument>("/steps", { bins: BINS, worst: 1 }),
  ]);
  const first = Math.max(0, about.newest_step - NEWEST + 1);
  const newest = about.newest_step < 0 ? steps : await get<StepsDocument>("/steps", { first, bins: NEWEST, worst: 1 });
  return { id, about, summary: summary.summary, steps, newest };
}

const TIMES: [string, string][] = [
  ["median", "p50_ms"],
  ["p90", "p90_ms"],
  ["p99", "p99_ms"],
  ["longest", "max_ms"],
];

/** Step times. The tail, which a few steps decide, differs by no less than the others do. */
export function stepPairs(one: ComparedRun, two: ComparedRun): Pair[] {
  const wall = eitherSpreadNs(one.newest, two.newest, "wall");
  return TIMES.map(([name, key]) => ({
    name,
    one: times(figure(one.summary, "step_time", key), MS),
    two: times(figure(two.summary, "step_time", key), MS),
    better: "less",
    spread: wall,
  }));
}

/** What the steps differ by, as a pace: of two medians that differ by just so much, the paces do. */
export function pacePair(one: ComparedRun, two: ComparedRun): Pair {
  const [a, b] = [one, two].map((run) => figure(run.summary, "steps", "per_second"));
  const [median] = stepPairs(one, two);
  const usual = Math.max(median?.one ?? 0, median?.two ?? 0);
  const share = (median?.spread ?? null) === null || !(usual > 0) ? null : (median?.spread ?? 0) / usual;
  return { name: "steps per second", one: a ?? null, two: b ?? null, better: "more", spread: share === null ? null : share * Math.max(a ?? 0, b ?? 0) };
}

/** By phase, the mean over ranks; one that only one of them has is nothing in the other. */
export function phasePairs(one: ComparedRun, two: ComparedRun): Pair[] {
  const names = [one, two].flatMap((run) => Object.keys(part(run.summary, "phases")));
  return ordered([...new Set(names)]).map((name) => {
    const [a, b] = [one, two].map((run) => figure(run.summary, "phases", name, "mean_ms") ?? 0);
    const pair: Pair = { name, one: times(a ?? null, MS), two: times(b ?? null, MS), better: "less", spread: eitherSpreadNs(one.newest, two.newest, name) };
    const rare = [one, two].some((run) => seldom(run.newest, name));
    return rare ? { ...pair, spread: null, unjudged: "not judged: most steps have none of it" } : pair;
  });
}

export function memoryPairs(one: ComparedRun, two: ComparedRun): Pair[] {
  const kinds: [string, string][] = [
    ["device, at most", "device_peak"],
    ["process with mapped files, at most", "rss_peak"],
  ];
  return kinds
    .map(([name, key]): Pair => {
      const [a, b] = [one, two].map((run) => figure(run.summary, "memory", key, "bytes"));
      const pair: Pair = { name, one: a ?? null, two: b ?? null, better: "less", spread: null };
      const alike = a != null && b != null && Math.abs(b - a) <= ALIKE * Math.max(a, b);
      return alike ? { ...pair, unjudged: "about the same" } : pair;
    })
    .filter((pair) => pair.one !== null || pair.two !== null);
}

/** What it was started with, and what it found. */
export function settingsOf(run: ComparedRun): Settings {
  const { context, world_size } = run.about;
  const [rank] = Array.isArray(run.summary["ranks"]) ? (run.summary["ranks"] as Record<string, unknown>[]) : [];
  const found: Settings = new Map();
  flattened(
    {
      command: context.command?.join(" "),
      folder: context.cwd,
      host: context.host,
      user: context.user,
      ranks: world_size,
      python: context.python,
      torch: rank?.["torch"],
      device: rank?.["device_name"] || rank?.["device"],
      backend: rank?.["backend"],
      platform: context.platform,
      stepscope: context.stepscope,
      git: context.git,
      environment: context.environment,
    },
    "",
    found,
  );
  const facts = part(run.summary, "facts");
  return flattened({ ...facts, peers: peersText(facts["peers"]) || facts["peers"] }, "", found);
}

function part(summary: Record<string, unknown>, ...path: string[]): Record<string, unknown> {
  let found: unknown = summary;
  for (const name of path) found = typeof found === "object" && found !== null ? (found as Record<string, unknown>)[name] : null;
  return typeof found === "object" && found !== null ? (found as Record<string, unknown>) : {};
}

function figure(summary: Record<string, unknown>, ...path: string[]): number | null {
  const found = part(summary, ...path.slice(0, -1))[path.at(-1) ?? ""];
  return typeof found === "number" && Number.isFinite(found) ? found : null;
}

function times(value: number | null, by: number): number | null {
  return value === null ? null : value * by;
}
