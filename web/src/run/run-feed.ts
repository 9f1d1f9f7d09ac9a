/**
 * The list of runs, kept up to date while the page is visible.
 *
 * All pages are loaded once, then only the newest runs: often while one of them is active, otherwise rarely, and never so
 * often that it loads the hub. Everything is loaded again if older runs disappeared.
 */

import { signal } from "@preact/signals";
import { encoded } from "../address";
import type { RunRow } from "../api/documents";
import type { Labels, RunsDocument } from "../api/history-documents";
import { aborted, type Failure, type Source } from "../api/source";
import { withNewest } from "./list-rows";
import { asFailure } from "./open-run";

const PAGE = 1000;
const SOON_MS = 3000;
const SELDOM_MS = 20_000;
/** Maximum share of the time spent on requests. */
const SHARE = 0.1;

export class RunFeed {
  readonly rows = signal<RunRow[] | null>(null);
  readonly failure = signal<Failure | null>(null);
  /** What this reader may do besides reading. */
  readonly may = signal<readonly string[]>([]);
  /** The reader's name. */
  readonly me = signal("");
  private readonly stop = new AbortController();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private busy = false;

  constructor(private readonly source: Source) {}

  /** Until `close`. */
  open(): void {
    document.addEventListener("visibilitychange", this.looked);
    void this.ask();
  }

  close(): void {
    this.stop.abort();
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.looked);
  }

  private readonly looked = (): void => {
    if (!document.hidden) void this.ask();
  };

  async ask(): Promise<void> {
    if (this.busy || this.stop.signal.aborted) return;
    clearTimeout(this.timer);
    this.busy = true;
    const beganMs = performance.now();
    try {
      await this.load(this.rows.value ?? []);
      this.failure.value = null;
    } catch (error) {
      if (aborted(error)) return;
      this.failure.value = asFailure(error);
    } finally {
      this.busy = false;
    }
    const going = this.failure.value !== null || this.rows.value?.some((row) => row.status === "running");
    const wait = Math.max(going ? SOON_MS : SELDOM_MS, (performance.now() - beganMs) / SHARE);
    this.timer = setTimeout(() => {
      if (!document.hidden) void this.ask();
    }, wait);
  }

  private async load(known: RunRow[]): Promise<void> {
    let { runs, total } = await this.page(0);
    let rows = withNewest(known, runs, total);
    if (rows === null) {
      rows = runs;
      while (rows.length < total && runs.length === PAGE) {
        if (known.length === 0) this.rows.value = rows;
        ({ runs, total } = await this.page(rows.length));
        const there: Set<string> = new Set(rows.map((row) => row.id)); // a new run shifts all others
        rows = [...rows, ...runs.filter((row) => !there.has(row.id))];
      }
    }
    this.rows.value = rows;
  }

  private async page(first: number): Promise<RunsDocument> {
    const found = await this.source.get<RunsDocument>("runs", { first, limit: PAGE }, this.stop.signal);
    this.may.value = found.may ?? [];
    this.me.value = found.me ?? "";
    return found;
  }

  /** Change the name, tags or note of a run. */
  async label(id: string, labels: Partial<Labels>): Promise<void> {
    const saved = await this.source.change<Labels>("POST", `runs/${encoded(id)}/labels`, labels);
    const change = (row: RunRow): RunRow => (row.id === id ? { ...row, ...saved, name: saved.name || row.name } : row);
    this.rows.value = this.rows.value?.map(change) ?? null;
    if (labels.name === "") void this.ask(); // only the hub knows the original name
  }

  async remove(id: string): Promise<void> {
    await this.source.change("DELETE", `runs/${encoded(id)}`);
    this.rows.value = this.rows.value?.filter((row) => row.id !== id) ?? null;
  }
}
