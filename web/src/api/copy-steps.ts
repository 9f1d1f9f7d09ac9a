/** Steps inside report.html: the requested range in the requested number of bins, merged as the hub merges bins. */

import { damaged, isPacked, isRecord, unpackTimes } from "./copy-bytes";
import type { StepsDocument, WorstRank } from "./documents";

const PLAIN = ["first", "last", "steps", "ranks", "start_wall_ns"] as const;

interface Worst {
  names: string[];
  places: number;
  rank: number[][];
  step: number[][];
  values: Float64Array;
}

export class CopySteps {
  private readonly columns: Record<(typeof PLAIN)[number], number[]>;
  private readonly quantiles: number[];
  private readonly ns: Map<string, Float64Array>;
  private readonly means: Map<string, Float64Array>;
  private readonly device: Map<string, Float64Array>;
  private readonly slowest: Float64Array | null;
  private readonly memory: Map<string, (number | null)[]>;
  private readonly worst: Worst | null;
  private readonly attempt: number;
  private readonly count: number;

  /** Throws a Failure if the columns are inconsistent. */
  constructor(document: unknown, blobs: Uint8Array) {
    if (!isRecord(document)) throw damaged("it has no steps");
    const column = (name: string): unknown[] => (Array.isArray(document[name]) ? document[name] : []);
    this.columns = Object.fromEntries(PLAIN.map((name) => [name, column(name)])) as CopySteps["columns"];
    this.count = this.columns.first.length;
    this.quantiles = column("quantiles") as number[];
    this.attempt = typeof document["attempt"] === "number" ? document["attempt"] : 0;
    this.ns = unpackedColumns(document["ns"], blobs, this.count * this.quantiles.length);
    this.means = unpackedColumns(document["mean_ns"], blobs, this.count);
    this.device = unpackedColumns(document["device_mean_ns"], blobs, this.count);
    this.slowest = unpackedColumns({ slowest: document["device_slowest_ns"] ?? [] }, blobs, isPacked(document["device_slowest_ns"]) ? this.count : 0).get("slowest") ?? null;
    this.memory = new Map(Object.entries(isRecord(document["memory_bytes"]) ? document["memory_bytes"] : {}) as [string, (number | null)[]][]);
    this.worst = worstOf(document["worst"], blobs, this.count);
    if (PLAIN.some((name) => this.columns[name].length !== this.count) || [...this.memory.values()].some((one) => !Array.isArray(one))) {
      throw damaged("its steps are inconsistent");
    }
  }

  answer(first: number, last: number, bins: number, worst: number): StepsDocument {
    let from = 0;
    while (from < this.count && (this.columns.last[from] ?? 0) < first) from += 1;
    let end = this.count;
    while (end > from && (this.columns.first[end - 1] ?? 0) > last) end -= 1;
    const width = Math.max(1, Math.ceil((end - from) / Math.max(1, bins)));
    const groups: [number, number][] = [];
    for (let at = from; at < end; at += width) groups.push([at, Math.min(at + width, end)]);
    const made = <T>(value: (from: number, end: number) => T): T[] => groups.map(([one, two]) => value(one, two));
    const { first: firsts, last: lasts, steps, ranks, start_wall_ns: starts } = this.columns;
    return {
      attempt: this.attempt,
      first: made((one) => firsts[one] ?? 0),
      last: made((_, two) => lasts[two - 1] ?? 0),
      steps: made((one, two) => sum(steps, one, two)),
      ranks: made((one, two) => Math.max(...ranks.slice(one, two))),
      quantiles: this.quantiles,
      ns: Object.fromEntries([...this.ns].map(([name, values]) => [name, made((one, two) => this.row(values, one, two))])),
      mean_ns: Object.fromEntries([...this.means].map(([name, values]) => [name, made((one, two) => this.mean(values, 1, 0, one, two))])),
      device_mean_ns: Object.fromEntries([...this.device].map(([name, values]) => [name, made((one, two) => this.deviceMean(values, one, two))])),
      ...(this.slowest === null || this.slowest.length === 0 ? {} : { device_slowest_ns: made((one, two) => longest(this.slowest ?? [], one, two)) }),
      worst: made((one, two) => this.worstOf(one, two, worst)),
      start_wall_ns: made((one) => starts[one] ?? 0),
      memory_bytes: Object.fromEntries([...this.memory].map(([name, levels]) => [name, made((one, two) => most(levels, one, two))])),
    };
  }

  /** Over several bins, minimum and maximum are exact; quantiles in between are means. */
  private row(values: Float64Array, from: number, end: number): number[] {
    const wide = this.quantiles.length;
    return this.quantiles.map((share, place) => {
      if (share !== 0 && share !== 1) return this.mean(values, wide, place, from, end);
      const choose = share === 0 ? Math.min : Math.max;
      let found = values[from * wide + place] ?? 0;
      for (let at = from + 1; at < end; at += 1) found = choose(found, values[at * wide + place] ?? found);
      return found;
    });
  }

  private mean(values: Float64Array, wide: number, place: number, from: number, end: number): number {
    if (end - from === 1) return values[from * wide + place] ?? 0;
    let total = 0;
    let weight = 0;
    for (let at = from; at < end; at += 1) {
      const steps = this.columns.steps[at] ?? 1;
      total += (values[at * wide + place] ?? 0) * steps;
      weight += steps;
    }
    return weight > 0 ? Math.round(total / weight) : 0;
  }

  /** Mean over the bins in which a device was timed; null if there are none. */
  private deviceMean(values: Float64Array, from: number, end: number): number | null {
    let total = 0;
    let weight = 0;
    for (let at = from; at < end; at += 1) {
      const value = values[at] ?? Number.NaN;
      if (Number.isNaN(value)) continue;
      const steps = this.columns.steps[at] ?? 1;
      total += value * steps;
      weight += steps;
    }
    return weight > 0 ? Math.round(total / weight) : null;
  }

  private worstOf(from: number, end: number, most: number): WorstRank[] {
    const kept = this.worst;
    if (kept === null) return [];
    const found: WorstRank[] = [];
    for (let at = from; at < end; at += 1) {
      kept.rank[at]?.forEach((rank, place) => {
        const start = (at * kept.places + place) * kept.names.length;
        const one: WorstRank = { rank, step: kept.step[at]?.[place] ?? 0, wall: 0, work: 0 };
        kept.names.forEach((name, which) => {
          one[name] = kept.values[start + which] ?? 0;
        });
        found.push(one);
      });
    }
    return found.sort((one, two) => two.work - one.work).slice(0, most);
  }
}

function unpackedColumns(columns: unknown, blobs: Uint8Array, length: number): Map<string, Float64Array> {
  const found = new Map<string, Float64Array>();
  for (const [name, packed] of Object.entries(isRecord(columns) ? columns : {})) {
    // A run without steps has empty lists here.
    const values = isPacked(packed) ? unpackTimes(packed, blobs) : new Float64Array(0);
    if (values.length !== length) throw damaged("its steps are inconsistent");
    found.set(name, values);
  }
  return found;
}

function worstOf(packed: unknown, blobs: Uint8Array, count: number): Worst | null {
  if (!isRecord(packed) || !isPacked(packed["values"])) return null;
  const { names, places, rank, step } = packed as unknown as Worst;
  const values = unpackTimes(packed["values"], blobs);
  if (!Array.isArray(names) || !Array.isArray(rank) || !Array.isArray(step) || values.length !== count * places * names.length) {
    throw damaged("its steps are inconsistent");
  }
  return { names, places, rank, step, values };
}

function sum(values: number[], from: number, end: number): number {
  let total = 0;
  for (let at = from; at < end; at += 1) total += values[at] ?? 0;
  return total;
}

function longest(values: ArrayLike<number>, from: number, end: number): number | null {
  let found: number | null = null;
  for (let at = from; at < end; at += 1) {
    const value = values[at] ?? Number.NaN;
    if (!Number.isNaN(value) && (found === null || value > found)) found = value;
  }
  return found;
}

function most(levels: (number | null)[], from: number, end: number): number | null {
  let found: number | null = null;
  for (let at = from; at < end; at += 1) {
    const level = levels[at] ?? null;
    if (level !== null && (found === null || level > found)) found = level;
  }
  return found;
}
