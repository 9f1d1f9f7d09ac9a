/** The parts of single ranks of traces: inside a file, or from a hub, which makes them when they are requested. */

import { Failure, type Source } from "./source";
import type { ReportDocument, TimelineDocument, ViewPart } from "./report-document";

export interface TraceData {
  /** The ranks that can be chosen. */
  readonly ranks: readonly number[];
  /** What to say if that is not all of them. */
  readonly note: string;
  rank(rank: number, stop: AbortSignal): Promise<ViewPart[]>;
  /** What the first rank does longer than the second. */
  difference(rank: number, peer: number, stop: AbortSignal): Promise<ViewPart[]>;
  /** null: there is nothing to draw. Missing: the timeline is among the parts of the report. */
  timeline?(rank: number, stop: AbortSignal): Promise<(TimelineDocument & { view?: string }) | null>;
  /** The merged timeline of all ranks for ui.perfetto.dev. */
  perfetto?(progress: (words: string) => void, stop: AbortSignal): Promise<Blob>;
}

export class EmbeddedTrace implements TraceData {
  readonly ranks: readonly number[];
  readonly note: string;

  constructor(private readonly report: ReportDocument) {
    this.ranks = Object.keys(report.of_ranks ?? {}).map(Number);
    const all = report.ranks?.length ?? 0;
    this.note = this.ranks.length < all ? `This file has the details of ${this.ranks.length} of ${all} ranks. “stepscope serve” shows all of them.` : "";
  }

  async rank(rank: number): Promise<ViewPart[]> {
    return this.report.of_ranks?.[rank] ?? [];
  }

  async difference(rank: number, peer: number): Promise<ViewPart[]> {
    const found = this.report.pairs?.[`${rank}-${peer}`];
    if (found !== undefined) return found;
    const [one, two] = this.report.pair ?? [];
    throw new Failure("missing", `This file compares rank ${one} with rank ${two}. “stepscope serve” compares any two ranks.`);
  }
}

/** While the hub works on something. */
interface Progress {
  state: "waiting" | "reading" | "failed" | "done";
  read_bytes: number;
  total_bytes: number;
  problem: string | null;
}

export type TraceAnswer = (Progress & { state: "waiting" | "reading" | "failed" }) | (ReportDocument & { state: "done" });

const AGAIN_MS = 300;

export class HubTrace implements TraceData {
  readonly note = "";
  private readonly known = new Map<string, ViewPart[]>();

  /** `path`: of the page, below `/api/v1/`. */
  constructor(
    private readonly source: Source,
    private readonly path: string,
    private readonly report: ReportDocument,
  ) {}

  get ranks(): readonly number[] {
    return this.report.ranks ?? [];
  }

  async rank(rank: number, stop: AbortSignal): Promise<ViewPart[]> {
    return this.report.of_ranks?.[rank] ?? this.parts(`ranks/${rank}`, {}, stop);
  }

  async difference(rank: number, peer: number, stop: AbortSignal): Promise<ViewPart[]> {
    return this.report.pairs?.[`${rank}-${peer}`] ?? this.parts(`ranks/${rank}`, { peer }, stop);
  }

  async timeline(rank: number, stop: AbortSignal): Promise<TimelineDocument | null> {
    const params = rank === this.report.rank ? {} : { rank };
    const found = await this.made<{ part: TimelineDocument | null } & Progress>("timeline", params, stop);
    return found.part;
  }

  async perfetto(progress: (words: string) => void, stop: AbortSignal): Promise<Blob> {
    progress("Merging the timelines of all ranks …");
    await this.made<Progress>("perfetto", {}, stop);
    progress("Reading the merged timeline …");
    if (this.source.blob === undefined) throw new Failure("fault", "This page cannot read files of the hub.");
    return this.source.blob(`${this.path}/perfetto.json.gz`);
  }

  private async parts(resource: string, params: Record<string, number>, stop: AbortSignal): Promise<ViewPart[]> {
    const key = `${resource} ${JSON.stringify(params)}`;
    const known = this.known.get(key);
    if (known !== undefined) return known;
    const { parts } = await this.made<{ parts: ViewPart[]; state?: Progress["state"]; problem?: string | null }>(resource, params, stop);
    this.known.set(key, parts);
    return parts;
  }

  private made<T extends Made>(resource: string, params: Record<string, number>, stop: AbortSignal): Promise<T> {
    return made<T>(this.source, `${this.path}/${resource}`, params, stop);
  }
}

/** An answer that may say how far the hub is with it. */
export interface Made {
  state?: Progress["state"];
  problem?: string | null;
}

/** Request something until the hub has made it. */
export async function made<T extends Made>(source: Source, path: string, params: Record<string, number>, stop: AbortSignal): Promise<T> {
  for (;;) {
    const found = await source.get<T>(path, params, stop);
    if (found.state === "failed") throw new Failure("fault", found.problem ?? "The hub cannot make this view.");
    if (found.state === undefined || found.state === "done") return found;
    await pause(AGAIN_MS, stop);
  }
}

export function pause(ms: number, stop: AbortSignal): Promise<void> {
  return new Promise((done, failed) => {
    const timer = setTimeout(done, ms);
    stop.addEventListener("abort", () => {
      clearTimeout(timer);
      failed(new DOMException("aborted", "AbortError"));
    });
  });
}
