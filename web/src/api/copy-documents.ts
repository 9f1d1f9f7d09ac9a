/** Lists inside report.html, with the hub's sorting, filtering and paging. */

import { isRecord } from "./copy-bytes";
import type { EventsDocument, RankDocument, RanksDocument, SamplesDocument } from "./documents";
import { Failure, type Params } from "./source";

export const text = (params: Params, name: string): string => String(params[name] ?? "");
export const words = (params: Params, name: string): string[] => text(params, name).split(",").filter(Boolean);

export function whole(params: Params, name: string, otherwise: number): number {
  const value = Number(params[name] ?? otherwise);
  return Number.isFinite(value) ? value : otherwise;
}

/** `FIRST-LAST` or one number; everything if missing. */
export function span(params: Params, name: string): [number, number] {
  const [first = "", last = first] = text(params, name).split("-");
  return first === "" ? [0, Infinity] : [Number(first), Number(last)];
}

export function ranksOf(kept: RanksDocument, params: Params): RanksDocument {
  const order = text(params, "order") || "rank";
  const onDevice = order.startsWith("device:") ? kept.device_mean_ns?.[order.slice("device:".length)] : undefined;
  const key = order === "rank" ? kept.rank.map((rank) => -rank) : (onDevice ?? kept.mean_ns[order]);
  if (key === undefined) throw new Failure("wrong", `Ranks cannot be sorted by ${order}.`);
  const [low, high] = span(params, "ranks");
  const places = kept.rank
    .map((_, at) => at)
    .filter((at) => (kept.rank[at] ?? -1) >= low && (kept.rank[at] ?? -1) <= high)
    .sort((one, two) => (key[two] ?? 0) - (key[one] ?? 0) || (kept.rank[one] ?? 0) - (kept.rank[two] ?? 0));
  const start = whole(params, "start", 0);
  const chosen = places.slice(start, start + whole(params, "limit", 1000));
  const taken = Object.entries(kept).map(([name, value]) => [name, Array.isArray(value) ? chosen.map((at) => (value as unknown[])[at]) : value]);
  const means = (columns: Record<string, number[]>): Record<string, number[]> =>
    Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, chosen.map((at) => values[at] ?? 0)]));
  return { ...(Object.fromEntries(taken) as RanksDocument), mean_ns: means(kept.mean_ns), device_mean_ns: means(kept.device_mean_ns ?? {}), start, order };
}

/** The curves have few points already; only cut out the range. */
export function rankOf(kept: RankDocument, params: Params): RankDocument {
  const from = whole(params, "first", 0);
  const to = whole(params, "last", Infinity);
  return { ...kept, steps: cut(kept.steps, from, to), past: cut(kept.past, from, to) };
}

function cut<T extends { first: number[]; last: number[] }>(columns: T, from: number, to: number): T {
  const inside = columns.first.map((first, at) => first <= to && (columns.last[at] ?? first) >= from);
  const count = columns.first.length;
  const chosen = (value: unknown): unknown => {
    if (Array.isArray(value)) return value.length === count ? value.filter((_, at) => inside[at]) : value;
    return isRecord(value) ? Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, chosen(inner)])) : value;
  };
  return chosen(columns) as T;
}

export function samplesOf(kept: SamplesDocument, params: Params): SamplesDocument {
  const nodes = words(params, "nodes");
  const fields = words(params, "fields");
  const from = whole(params, "first_ns", -Infinity);
  const to = whole(params, "last_ns", Infinity);
  const inside = kept.wall_ns.map((start) => start <= to && start + kept.bin_ns > from);
  const width = Math.max(1, Math.ceil(inside.filter(Boolean).length / Math.max(1, whole(params, "bins", 512))));
  const shorter = <T>(values: T[], join: (values: T[]) => T): T[] => grouped(values.filter((_, at) => inside[at]), width).map(join);
  const wanted = kept.series.filter((one) => nodes.length === 0 || nodes.includes(one.node));
  const limit = whole(params, "limit", 256);
  return {
    ...kept,
    wall_ns: shorter(kept.wall_ns, (values) => values[0] ?? 0),
    bin_ns: kept.bin_ns * width,
    left_out: kept.left_out + Math.max(0, wanted.length - limit),
    series: wanted.slice(0, limit).map((one) => ({
      ...one,
      values: Object.fromEntries(
        Object.entries(one.values)
          .filter(([name]) => fields.length === 0 || fields.includes(name))
          .map(([name, values]) => [name, shorter(values, kept.stat === "last" ? last : mean)]),
      ),
    })),
  };
}

export function eventsOf(kept: EventsDocument, params: Params): EventsDocument {
  const after = whole(params, "after", 0);
  const kinds = words(params, "event");
  const later = kept.events.filter((event) => event.number > after).slice(0, whole(params, "limit", 1000));
  return {
    ...kept,
    next: later.at(-1)?.number ?? after,
    events: later.filter((event) => kinds.length === 0 || kinds.includes(event.event)),
  };
}

function grouped<T>(values: T[], width: number): T[][] {
  const found: T[][] = [];
  for (let at = 0; at < values.length; at += width) found.push(values.slice(at, at + width));
  return found;
}

const last = (values: (number | null)[]): number | null => values.findLast((value) => value !== null) ?? null;

function mean(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
