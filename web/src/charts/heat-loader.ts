/**
 * Loads and caches pieces of the map.
 *
 * `look` sets the visible part: if no cached piece shows it well, one is requested shortly after the last movement. `newer`
 * means that the run progressed: only the new steps (and the last few, which may have been incomplete) are requested and
 * appended to the visible piece. The whole piece is requested again if cells would be narrower than a pixel, and once a
 * minute. The most recently used pieces are kept, up to a number of cells.
 */

import { aborted, type Failure, type Source } from "../api/source";
import { asFailure } from "../run/open-run";
import { appended, openFrom, pieceOf, type HeatRequest, type Piece, type Stat } from "./heat-piece";
import { paramsOf, questionFor, serves, type Pixels } from "./heat-request";
import { same, type HeatWindow } from "./heat-window";
import { isOnDevice } from "./heat-words";

/** Delay after the last movement, and its maximum. */
const SETTLE_MS = 70;
const LONGEST_MS = 220;
/** Between two requests for new steps. */
const TIP_MS = 300;
const WHOLE_MS = 60_000;
const MOST_CELLS = 3 << 20;
const MOST_NEW_STEPS = 1024;
const MOST_NEW_CELLS = 1 << 20;
const RETRY_MS = 2000;

export interface Seen {
  window: HeatWindow;
  /** The whole range. */
  all: HeatWindow;
  pixels: Pixels;
}

export class HeatLoader {
  /** The piece for the whole range: drawn below the others, and visible until they are loaded. */
  whole: Piece | null = null;
  failure: Failure | null = null;
  /** First step for which the hub has this value, from its last response. */
  knownFrom = 0;
  /** Requests and received cells, for tests and measurements. */
  readonly counts = { requested: 0, appended: 0, cells: 0 };

  /** Most recently used last. */
  private parts: Piece[] = [];
  private seen: Seen | null = null;
  /** The last request that was answered in any way; it is not repeated automatically. */
  private answered: HeatRequest | null = null;
  private asking: { requested: HeatRequest; stop: AbortController } | null = null;
  private tipping: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private tipTimer: ReturnType<typeof setTimeout> | null = null;
  private waitingMs: number | null = null;
  private tippedMs = -Infinity;
  private readonly born = new WeakMap<HeatRequest, number>();

  constructor(
    private readonly source: Pick<Source, "heat">,
    private readonly run: string,
    readonly value: string,
    readonly stat: Stat,
    private readonly onChange: () => void,
  ) {}

  close(): void {
    this.asking?.stop.abort();
    this.tipping?.abort();
    for (const timer of [this.timer, this.tipTimer]) if (timer !== null) clearTimeout(timer);
    this.seen = this.whole = null;
    this.parts = [];
  }

  /** In drawing order: the best last. */
  pieces(): Piece[] {
    return this.whole === null ? this.parts : [this.whole, ...this.parts];
  }

  /** The piece that shows the visible part in the best resolution, except for steps that `newer` adds; null: none. */
  best(): Piece | null {
    const seen = this.seen;
    if (seen === null) return null;
    return this.pieces().findLast((piece) => serves(piece, reached(piece, seen), seen.pixels)) ?? null;
  }

  /** Whether everything visible is loaded. */
  settled(): boolean {
    return (this.best() !== null || this.nothing()) && this.asking === null && this.timer === null;
  }

  /** Whether the hub has no data for the visible part. */
  private nothing(): boolean {
    const { seen, answered } = this;
    return seen !== null && answered !== null && this.failure === null && alike(answered, questionFor(within(seen), seen.all, seen.pixels));
  }

  look(seen: Seen): void {
    this.seen = seen;
    const found = this.best();
    if (found !== null) {
      if (found !== this.whole && this.parts.at(-1) !== found) this.parts = [...this.parts.filter((piece) => piece !== found), found];
      if (!this.stale(found)) {
        this.cancel();
        return;
      }
    }
    const requested = questionFor(within(seen), seen.all, seen.pixels);
    if (this.asking !== null && alike(this.asking.requested, requested)) return;
    if (found === null && this.answered !== null && alike(this.answered, requested)) return;
    const now = performance.now();
    this.waitingMs ??= now;
    if (this.timer !== null) clearTimeout(this.timer);
    const wait = this.whole === null ? 0 : Math.max(0, Math.min(SETTLE_MS, this.waitingMs + LONGEST_MS - now));
    this.timer = setTimeout(() => {
      this.timer = null;
      void this.ask(requested, seen.all);
    }, wait);
  }

  /** The run has new steps, up to `all.step1`. */
  newer(): void {
    if (this.tipTimer !== null || this.tipping !== null) return;
    this.tipTimer = setTimeout(
      () => {
        this.tipTimer = null;
        void this.tip();
      },
      Math.max(0, this.tippedMs + TIP_MS - performance.now()),
    );
  }

  private again(): void {
    this.answered = null;
    if (this.seen !== null) this.look(this.seen);
  }

  /** Check whether the new data settles the visible part before notifying. */
  private tell(): void {
    if (this.seen !== null) this.look(this.seen);
    this.onChange();
  }

  private cancel(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = this.waitingMs = null;
  }

  /** A piece that grew by appending is requested again after a while. */
  private stale(piece: Piece): boolean {
    return piece.grown && performance.now() - (this.born.get(piece.requested) ?? 0) > WHOLE_MS;
  }

  private async ask(requested: HeatRequest, all: HeatWindow): Promise<void> {
    this.asking?.stop.abort();
    const stop = new AbortController();
    this.asking = { requested, stop };
    this.waitingMs = null;
    this.counts.requested += 1;
    try {
      const heat = await this.source.heat(this.run, paramsOf(requested, this.value, this.stat), stop.signal);
      if (stop.signal.aborted) return;
      this.counts.cells += heat.cells.length;
      this.failure = null;
      this.knownFrom = heat.knownFrom;
      this.answered = requested;
      this.born.set(requested, performance.now());
      this.keep(pieceOf({ ...heat, held: heat.unit === "bytes" || isOnDevice(this.value) }, this.stat, requested, requested.window.step1 >= all.step1), all);
    } catch (error) {
      if (aborted(error) || stop.signal.aborted) return;
      this.failure = asFailure(error);
      this.answered = requested;
      if (this.failure.trouble !== "wrong") setTimeout(() => this.again(), RETRY_MS);
    } finally {
      if (this.asking?.stop === stop) this.asking = null;
    }
    this.tell();
  }

  private async tip(): Promise<void> {
    const seen = this.seen;
    const piece = this.best();
    if (seen === null || piece === null) return;
    const last = within(seen).step1;
    const first = openFrom(piece);
    if (last < piece.requested.window.step1 || first >= last) return;
    if ((last - first) * piece.heat.firstRanks.length > MOST_NEW_CELLS) return this.ask(questionFor(within(seen), seen.all, seen.pixels), seen.all);
    const stop = (this.tipping = new AbortController());
    this.tippedMs = performance.now();
    this.counts.appended += 1;
    const requested = { ...piece.requested, stepSpan: 1, window: { ...piece.requested.window, step0: first, step1: last } };
    try {
      // If the hub has only means of bins, append means.
      const heat = await this.source.heat(this.run, paramsOf(requested, this.value, piece.heat.exact ? this.stat : "mean"), stop.signal);
      this.counts.cells += heat.cells.length;
      this.knownFrom = heat.knownFrom;
      this.replace(piece, appended(piece, heat), last);
    } catch (error) {
      if (aborted(error)) return;
      this.failure = asFailure(error);
    } finally {
      this.tipping = null;
    }
    this.tell();
  }

  private replace(piece: Piece, longer: Piece | null, step1: number): void {
    const requested = { ...piece.requested, window: { ...piece.requested.window, step1 } };
    this.born.set(requested, this.born.get(piece.requested) ?? 0);
    const next = longer && { ...longer, requested, grown: true };
    if (piece === this.whole) this.whole = next;
    else this.parts = this.parts.flatMap((one) => (one !== piece ? [one] : next === null ? [] : [next]));
  }

  private keep(piece: Piece | null, all: HeatWindow): void {
    if (piece === null) return;
    const { window } = piece.requested;
    if (window.step0 <= all.step0 && window.step1 >= all.step1 && window.rank0 <= all.rank0 && window.rank1 >= all.rank1) {
      this.whole = piece;
      // Keep the previous data.
      this.parts = this.parts.filter((one) => !one.grown);
      return;
    }
    const kept = [...this.parts, piece];
    let cells = kept.reduce((sum, one) => sum + one.heat.cells.length, 0);
    while (kept.length > 1 && cells > MOST_CELLS) cells -= kept.shift()?.heat.cells.length ?? 0;
    this.parts = kept;
  }
}

/** Whether two requests are equal; the same part with other cell sizes differs. */
function alike(one: HeatRequest, two: HeatRequest): boolean {
  return same(one.window, two.window) && one.stepSpan === two.stepSpan && one.rankSpan === two.rankSpan;
}

/** The part of the window that a piece must cover: newest steps can still be appended to a piece that reached the end. */
function reached(piece: Piece, seen: Seen): HeatWindow {
  const window = within(seen);
  const end = piece.requested.window.step1;
  const near = window.step1 - end <= MOST_NEW_STEPS && window.step1 >= seen.all.step1 && end > window.step0;
  return piece.open && near ? { ...window, step1: Math.min(window.step1, end) } : window;
}

/** The part of the window with data. */
function within({ window, all }: Seen): HeatWindow {
  return {
    step0: Math.max(window.step0, all.step0),
    step1: Math.max(all.step0 + 1, Math.min(window.step1, all.step1)),
    rank0: window.rank0,
    rank1: window.rank1,
  };
}
