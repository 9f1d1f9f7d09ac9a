/** Worst and median rank by phase: the figures behind the bars. */

import type { RanksDocument } from "../api/documents";
import { ordered } from "../charts/palette";
import type { Csv } from "../ui/csv";

export interface Pair {
  name: string;
  median: number;
  worst: number;
  worstRank: number;
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
    return {
      name,
      median: median(values),
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
export function pairsOfSummary(summary: Record<string, unknown>): Pair[] {
  return phaseRows(summary).flatMap(([name, row]) => pairOf(name, row)).sort(byDifference);
}

/** The same for the devices; empty unless every phase was timed there, as in summary.txt. */
export function devicePairs(summary: Record<string, unknown>): DevicePair[] {
  return deviceRows(summary).flatMap(({ name, device, host }) => pairOf(name, device).map((pair) => ({ ...pair, host }))).sort(byDifference);
}

/** For one rank: each phase's share of the device time, largest first. */
export function deviceShares(summary: Record<string, unknown>): (Share & { host: number })[] {
  return deviceRows(summary)
    .flatMap(({ name, device, host }) => {
      const [share, middle] = [device["share"], device["median_ms"]];
      return typeof share === "number" && typeof middle === "number" && middle > 0 ? [{ name, share, ns: middle * 1e6, host }] : [];
    })
    .sort((one, two) => two.share - one.share);
}

type Row = Record<string, unknown>;

function phaseRows(summary: Row): [string, Row][] {
  const phases = summary["phases"];
  return typeof phases === "object" && phases !== null ? Object.entries(phases as Record<string, Row>) : [];
}

function deviceRows(summary: Row): { name: string; device: Row; host: number }[] {
  const rows = phaseRows(summary).map(([name, row]) => ({ name, device: row["device"] as Row | null | undefined, host: Number(row["median_ms"] ?? 0) * 1e6 }));
  return rows.every(({ device }) => typeof device === "object" && device !== null) ? (rows as { name: string; device: Row; host: number }[]) : [];
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

export function shareTable(found: readonly (Share & { host: number })[]): Csv {
  return { columns: ["name", "device_share", "device_median_ns", "host_median_ns"], rows: found.map(({ name, share, ns, host }) => [name, share, ns, host]) };
}

/** Phases timed on the device also get the host's median. */
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
