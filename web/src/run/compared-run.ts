/** One of two compared runs: the data it needs, and the figures that are compared. */

import type { MetricsDocument, RunDocument, StepsDocument, SummaryDocument } from "../api/documents";
import { aborted, type Source } from "../api/source";
import { encoded } from "../address";
import { flattened, type Settings } from "./compare-settings";
import { eitherSpreadNs, seldom, type Pair } from "./compare";
import { BINS, onDeviceClock } from "./steps";
import { ordered } from "../charts/palette";
import { peersText } from "../words/context";

/** Individual steps, for the spread. */
const NEWEST = 512;
const MS = 1e6;
/** Peak memory is one figure without a spread; relative differences below this count as equal. */
const ALIKE = 0.02;

export interface ComparedRun {
  id: string;
  about: RunDocument;
  summary: Record<string, unknown>;
  steps: StepsDocument;
  newest: StepsDocument;
  /** What the script noted; missing from older hubs and copies. */
  metrics?: MetricsDocument | null;
}

export async function askRun(source: Source, id: string, stop: AbortSignal): Promise<ComparedRun> {
  const get = <T>(resource: string, params = {}): Promise<T> => source.get<T>(`runs/${encoded(id)}${resource}`, params, stop);
  const [about, summary, steps, metrics] = await Promise.all([
    get<RunDocument>(""),
    get<SummaryDocument>("/summary"),
    get<StepsDocument>("/steps", { bins: BINS, worst: 1 }),
    get<MetricsDocument>("/metrics", { bins: BINS }).catch((error: unknown) => (aborted(error) ? Promise.reject(error) : null)),
  ]);
  const first = Math.max(0, about.newest_step - NEWEST + 1);
  const newest = about.newest_step < 0 ? steps : await get<StepsDocument>("/steps", { first, bins: NEWEST, worst: 1 });
  return { id, about, summary: summary.summary, steps, newest, metrics };
}

const TIMES: [string, string][] = [
  ["median", "p50_ms"],
  ["p90", "p90_ms"],
  ["p99", "p99_ms"],
  ["longest", "max_ms"],
];

/** Step times. The tail depends on a few steps and varies at least as much as the median. */
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

/** Steps per second; its spread is that of the median step time, as a share. */
export function pacePair(one: ComparedRun, two: ComparedRun): Pair {
  const [a, b] = [one, two].map((run) => figure(run.summary, "steps", "per_second"));
  const [median] = stepPairs(one, two);
  const usual = Math.max(median?.one ?? 0, median?.two ?? 0);
  const share = (median?.spread ?? null) === null || !(usual > 0) ? null : (median?.spread ?? 0) / usual;
  return { name: "steps per second", one: a ?? null, two: b ?? null, better: "more", spread: share === null ? null : share * Math.max(a ?? 0, b ?? 0) };
}

/** Whether the findings of both runs use the devices' clock. */
export function onDevice(one: ComparedRun, two: ComparedRun): boolean {
  return one.about.clock === "device" && two.about.clock === "device";
}

/** Phases by the clock of the findings, mean over ranks; a phase that only one run has is zero in the other. */
export function phasePairs(one: ComparedRun, two: ComparedRun): Pair[] {
  const names = [one, two].flatMap((run) => Object.keys(part(run.summary, "phases")));
  const device = onDevice(one, two);
  const [first, second] = [one, two].map((run) => (device ? onDeviceClock(run.newest) : run.newest)) as [StepsDocument, StepsDocument];
  return ordered([...new Set(names)]).map((name) => {
    const [a, b] = [one, two].map((run) => figure(run.summary, "phases", name, ...(device ? ["device"] : []), "mean_ms") ?? 0);
    const pair: Pair = { name, one: times(a ?? null, MS), two: times(b ?? null, MS), better: "less", spread: eitherSpreadNs(first, second, name) };
    const rare = [first, second].some((steps) => seldom(steps, name));
    return rare ? { ...pair, spread: null, unjudged: "not judged: most steps do not have this phase" } : pair;
  });
}

/** The last value of each number that a script noted: only the user knows which is better. */
export function metricPairs(one: ComparedRun, two: ComparedRun): Pair[] {
  const lasts = [one, two].map((run) => new Map(run.metrics?.metrics.map(({ name, value }) => [name, value.at(-1) ?? null]) ?? []));
  const names = [...new Set(lasts.flatMap((values) => [...values.keys()]))];
  return names.map((name) => ({ name, one: lasts[0]?.get(name) ?? null, two: lasts[1]?.get(name) ?? null, better: "less", spread: null, unjudged: "" }));
}

export function memoryPairs(one: ComparedRun, two: ComparedRun): Pair[] {
  const kinds: [string, string][] = [
    ["device, peak", "device_peak"],
    ["process with mapped files, peak", "rss_peak"],
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

/** How the run was started, and its environment. */
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
