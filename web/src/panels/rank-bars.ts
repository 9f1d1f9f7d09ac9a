/** Worst and median rank by phase: the figures behind the bars. */

import type { RanksDocument } from "../api/documents";
import { ordered } from "../charts/palette";
import type { Csv } from "../ui/csv";

export interface Pair {
  name: string;
  /** Of two ranks: the other rank's, since their median would contain half of the worst. */
  median: number;
  worst: number;
  worstRank: number;
  /** Of two ranks: the other one. */
  otherRank?: number;
  /** For `comm`: the rank that waits least is the one the others wait for. */
  least: number | null;
  leastRank: number | null;
}

/** Device time of a phase, plus the median rank's host time. */
export interface DevicePair extends Pair {
  host: number;
}

export interface Share {
  name: string;
  ns: number;
  share: number;
}

/** `wall` and `work` first, then the phases by difference, largest first. Ranks without steps are left out. */
export function pairs(ranks: Pick<RanksDocument, "rank" | "mean_ns">): Pair[] {
  const walls = ranks.mean_ns["wall"] ?? [];
  const rows = ranks.rank.flatMap((_, at) => ((walls[at] ?? 0) > 0 ? [at] : []));
  if (rows.length === 0) return [];
  const pair = (name: string): Pair => {
    const values = rows.map((at) => ranks.mean_ns[name]?.[at] ?? 0);
    const [most, fewest] = [values.indexOf(Math.max(...values)), values.indexOf(Math.min(...values))];
    const waits = name === "comm";
    const other = rows.length === 2 ? 1 - most : null;
    return {
      name,
      ...(other === null ? { median: median(values) } : { median: values[other] ?? 0, otherRank: ranks.rank[rows[other] ?? 0] ?? 0 }),
      worst: values[most] ?? 0,
      worstRank: ranks.rank[rows[most] ?? 0] ?? 0,
      least: waits ? (values[fewest] ?? 0) : null,
      leastRank: waits ? (ranks.rank[rows[fewest] ?? 0] ?? 0) : null,
    };
  };
  const phases = ordered(Object.keys(ranks.mean_ns).filter((name) => name !== "wall" && name !== "work")).map(pair);
  const timed = phases.filter(({ worst }) => worst > 0).sort(byDifference);
  return [...["wall", "work"].filter((name) => ranks.mean_ns[name] !== undefined).map(pair), ...timed];
}

/** The same from a summary, if there are too many ranks to request. */
export function pairsOfSummary(summary: Record<string, unknown>, device = false): Pair[] {
  return phaseRows(summary)
    .flatMap(([name, row]) => pairOf(name, device ? ((row["device"] ?? {}) as Row) : row))
    .sort(byDifference);
}

/** The ranks with their means on the device instead; the same as given if there are none. */
export function onClock<T extends Pick<RanksDocument, "rank" | "mean_ns" | "device_mean_ns">>(ranks: T, device: boolean): T {
  const found = ranks.device_mean_ns ?? {};
  return device && Object.keys(found).length > 0 ? { ...ranks, mean_ns: found } : ranks;
}

/** Add the median rank's host time. */
export function withHost(found: readonly Pair[], host: readonly Pair[]): DevicePair[] {
  const medians = new Map(host.map(({ name, median }) => [name, median]));
  return found.map((pair) => ({ ...pair, host: medians.get(pair.name) ?? 0 }));
}

type Row = Record<string, unknown>;

function phaseRows(summary: Row): [string, Row][] {
  const phases = summary["phases"];
  return typeof phases === "object" && phases !== null ? Object.entries(phases as Record<string, Row>) : [];
}

function pairOf(name: string, row: Row): Pair[] {
  const [middle, worst, rank] = [row["median_ms"], row["worst_ms"], row["worst_rank"]];
  if (typeof middle !== "number" || typeof worst !== "number" || typeof rank !== "number" || worst <= 0) return [];
  return [{ name, median: middle * 1e6, worst: worst * 1e6, worstRank: rank, least: null, leastRank: null }];
}

const byDifference = (one: Pair, two: Pair): number => two.worst - two.median - (one.worst - one.median);

/** For one rank: each phase's share of the step, largest first. */
export function shares(ranks: Pick<RanksDocument, "rank" | "mean_ns">): Share[] {
  const wall = ranks.mean_ns["wall"]?.[0] ?? 0;
  if (!(wall > 0)) return [];
  return Object.entries(ranks.mean_ns)
    .filter(([name]) => name !== "wall" && name !== "work")
    .map(([name, values]) => ({ name, ns: values[0] ?? 0, share: (values[0] ?? 0) / wall }))
    .filter(({ ns }) => ns > 0)
    .sort((one, two) => two.ns - one.ns);
}

export function rankTable(ranks: RanksDocument): Csv {
  const names = ["wall", "work", ...ordered(Object.keys(ranks.mean_ns).filter((name) => name !== "wall" && name !== "work"))];
  return {
    columns: ["rank", "host", "state", "last_step", ...names.map((name) => `${name}_mean_ns`)],
    rows: ranks.rank.map((rank, at) => [rank, ranks.host[at] ?? null, ranks.state[at] ?? null, ranks.last_step[at] ?? null, ...names.map((name) => ranks.mean_ns[name]?.[at] ?? null)]),
  };
}

/** Shares on the device, with host times. */
export function shareTable(found: readonly (Share & { host: number })[]): Csv {
  return { columns: ["name", "device_share", "device_mean_ns", "host_mean_ns"], rows: found.map(({ name, share, ns, host }) => [name, share, ns, host]) };
}

/** Pairs timed on the device also get the host's median. */
export function pairTable(found: readonly (Pair | DevicePair)[]): Csv {
  const timed = found.some((pair) => "host" in pair);
  return {
    columns: ["name", ...(timed ? ["clock"] : []), "median_ns", "worst_ns", "worst_rank", ...(timed ? ["host_median_ns"] : [])],
    rows: found.map((pair) => {
      const figures = [pair.median, pair.worst, pair.worstRank];
      return [pair.name, ...(timed ? ["host" in pair ? "device" : "host", ...figures, "host" in pair ? pair.host : pair.median] : figures)];
    }),
  };
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((one, two) => one - two);
  const middle = sorted.length >> 1;
  if (sorted.length === 0) return Number.NaN;
  return sorted.length % 2 ? (sorted[middle] ?? 0) : ((sorted[middle - 1] ?? 0) + (sorted[middle] ?? 0)) / 2;
}
