/**
 * The map of one run: connects the run's signals, the canvas, the loader and user input.
 *
 * The panel reads these signals. The visible steps are `run.view`, shared by all charts; the visible ranks are kept only
 * here.
 */

import { batch, effect, signal, untracked } from "@preact/signals";
import type { Severity } from "../api/documents";
import type { Failure } from "../api/source";
import type { OpenRun } from "../run/open-run";
import { theme, token } from "../ui/theme";
import { robustRange, steadied, type Range } from "./color-scale";
import { linkCursor, type CursorLink } from "./cursor-link";
import { HeatCanvas } from "./heat-canvas";
import { attachGestures, type DragMode } from "./heat-gestures";
import { HeatLoader } from "./heat-loader";
import { cellOf, cellsWithin, type Cell, type Piece, type Stat } from "./heat-piece";
import { inksOf, type RankMark, type Span } from "./heat-picture";
import type { At, HeatWindow } from "./heat-window";

export interface Pointed {
  cell: Cell;
  piece: Piece;
  x: number;
  y: number;
  /** Moved by keyboard: announce it to screen readers. */
  keyed: boolean;
}

const WORST: Severity[] = ["critical", "warning", "info"];
const NEARER = 0.5;

export class HeatControl {
  readonly pointed = signal<Pointed | null>(null);
  readonly range = signal<Range | null>(null);
  readonly piece = signal<Piece | null>(null);
  readonly failure = signal<Failure | null>(null);
  readonly mode = signal<DragMode>("choose");
  readonly held = signal(false);
  readonly near = signal(false);
  /** First step with this value, if the visible range starts before it; else null. */
  readonly knownFrom = signal<number | null>(null);
  /** Finer data for the visible part is still loading. */
  readonly busy = signal(true);
  loader: HeatLoader;
  readonly heat: HeatCanvas;

  private ranks: { rank0: number; rank1: number } | null = null;
  private readonly link: CursorLink;
  private readonly ends: (() => void)[] = [];

  constructor(
    readonly run: OpenRun,
    canvas: HTMLCanvasElement,
    context: CanvasRenderingContext2D,
  ) {
    this.loader = this.makeLoader("work", "max");
    this.heat = new HeatCanvas(canvas, context, allOf(run), {
      seen: (window, pixels) => this.seen(window, pixels),
      rested: (window) => this.rested(window),
    });
    this.link = linkCursor(`${run.name}/steps`, (x) => this.heat.show({ linkedStep: x === null ? null : Math.round(x) }));
    this.heat.show({ pieces: [], range: null, marks: [], nodes: [], rank: null, step: null, pointed: null, linkedStep: null, stretch: null });
    this.ends.push(
      attachGestures(this.heat, {
        mode: () => this.mode.peek(),
        pointed: (at, x, y) => this.point(at, x, y, false),
        chosen: (at) => this.choose(at),
        stretch: (stretch) => this.heat.show({ stretch }),
      }),
      effect(() => {
        void theme.value;
        // The colors are available once the new theme's style sheet applies.
        queueMicrotask(() => this.heat.show({ inks: inksOf(token) }));
      }),
      effect(() => this.heat.show({ rank: run.rank.value, step: run.step.value, marks: marksOf(run) })),
      effect(() => this.follow()),
    );
    this.heat.show({ inks: inksOf(token) });
  }

  close(): void {
    for (const end of this.ends) end();
    this.link.close();
    this.loader.close();
    this.heat.close();
  }

  setValue(value: string, stat: Stat): void {
    if (value === this.loader.value && stat === this.loader.stat) return;
    this.restart(value, stat);
  }

  setNodes(nodes: Span[]): void {
    this.heat.show({ nodes });
  }

  hold(held: boolean): void {
    this.held.value = held;
    if (!held) this.recolor(null);
  }

  zoom(by: number): void {
    const cell = this.pointed.peek()?.cell;
    const at = cell === undefined ? this.heat.middle() : { step: (cell.firstStep + cell.lastStep + 1) / 2, rank: (cell.firstRank + cell.lastRank + 1) / 2 };
    this.heat.zoom({ steps: by, ranks: by }, at);
  }

  all(): void {
    this.heat.move(this.heat.all);
  }

  /** Whether the key was handled. */
  key(key: string): boolean {
    const moves: Record<string, [number, number]> = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
      PageUp: [0, -10],
      PageDown: [0, 10],
    };
    const by = moves[key];
    const cell = this.pointed.peek()?.cell;
    if (by !== undefined) this.step(by[0], by[1]);
    else if (key === "+" || key === "=") this.zoom(NEARER);
    else if (key === "-" || key === "_") this.zoom(1 / NEARER);
    else if (key === "Home" || key === "0") this.all();
    else if ((key === "Enter" || key === " ") && cell !== undefined) this.choose({ rank: cell.firstRank, step: cell.firstStep });
    else if (key === "Escape" && cell !== undefined) this.point(null, 0, 0, true);
    else return false;
    return true;
  }

  /** Move to a neighboring cell; the first time to the rank of a finding, or to the middle. */
  private step(columns: number, rows: number): void {
    const now = this.pointed.peek();
    const { all } = this.heat;
    let at: At;
    if (now === null) {
      const { step, rank } = this.heat.middle();
      at = { step: this.run.step.peek() ?? Math.floor(step), rank: this.run.rank.peek() ?? marksOf(this.run)[0]?.rank ?? Math.floor(rank) };
    } else {
      const { cell, piece } = now;
      const side = (by: number, first: number, last: number, wide: number): number =>
        by === 0 ? first : by < 0 ? first - 1 - (-by - 1) * wide : last + 1 + (by - 1) * wide;
      at = {
        step: side(columns, cell.firstStep, cell.lastStep, piece.stepSpan),
        rank: side(rows, cell.firstRank, cell.lastRank, piece.rankSpan),
      };
    }
    at = {
      step: Math.min(Math.max(at.step, all.step0), all.step1 - 1),
      rank: Math.min(Math.max(at.rank, all.rank0), all.rank1 - 1),
    };
    this.heat.follow(at);
    const { box, window } = this.heat;
    const x = box.left + ((at.step + 0.5 - window.step0) / (window.step1 - window.step0)) * box.width;
    const y = box.top + ((at.rank + 0.5 - window.rank0) / (window.rank1 - window.rank0)) * box.height;
    this.point(at, x, y, true);
  }

  private point(at: At | null, x: number, y: number, keyed: boolean): void {
    const found = at === null ? null : this.cellAt(at);
    this.pointed.value = found && { ...found, x, y, keyed };
    this.heat.show({ pointed: found?.cell ?? null });
    this.link.tell(at === null ? null : at.step);
  }

  private cellAt(at: At): { cell: Cell; piece: Piece } | null {
    const best = this.loader.best();
    for (const piece of best === null ? this.loader.pieces().reverse() : [best]) {
      const cell = cellOf(piece, at.rank, at.step);
      if (cell !== null) return { cell, piece };
    }
    return null;
  }

  /** Select rank and step; in a cell of several, those under the pointer. */
  private choose(at: At): void {
    batch(() => {
      this.run.rank.value = at.rank;
      this.run.step.value = at.step;
    });
  }

  private seen(window: HeatWindow, pixels: { width: number; height: number }): void {
    const { all } = this.heat;
    this.near.value = window.step1 - window.step0 < all.step1 - all.step0 || window.rank1 - window.rank0 < all.rank1 - all.rank0;
    this.loader.look({ window, all, pixels });
    this.refresh();
  }

  private rested(window: HeatWindow): void {
    const { all } = this.heat;
    const allSteps = window.step0 <= all.step0 && window.step1 >= all.step1;
    const allRanks = window.rank0 <= all.rank0 && window.rank1 >= all.rank1;
    this.ranks = allRanks ? null : { rank0: window.rank0, rank1: window.rank1 };
    this.run.view.value = allSteps ? null : { first: window.step0, last: window.step1 - 1 };
    this.recolor(this.range.peek());
  }

  /** The run progressed, or the view changed. */
  private follow(): void {
    const all = allOf(this.run);
    const view = this.run.view.value;
    void this.run.beat.value;
    untracked(() => {
      const grown = all.step1 > this.heat.all.step1;
      const clipped = view === null ? null : { step0: Math.max(all.step0, view.first), step1: Math.min(all.step1, view.last + 1) };
      const steps = clipped === null || clipped.step1 <= clipped.step0 ? { step0: all.step0, step1: all.step1 } : clipped;
      const ranks = this.ranks ?? { rank0: all.rank0, rank1: all.rank1 };
      this.heat.reach(all, { ...steps, ...ranks });
      if (grown) {
        this.loader.look({ window: this.heat.window, all, pixels: this.heat.pixels() });
        this.loader.newer();
      }
    });
  }

  restart(value = this.loader.value, stat = this.loader.stat): void {
    this.loader.close();
    this.loader = this.makeLoader(value, stat);
    batch(() => {
      this.range.value = this.piece.value = this.failure.value = this.pointed.value = this.knownFrom.value = null;
      this.held.value = false;
    });
    this.heat.show({ pointed: null, pieces: [], range: null });
    this.loader.look({ window: this.heat.window, all: this.heat.all, pixels: this.heat.pixels() });
  }

  private makeLoader(value: string, stat: Stat): HeatLoader {
    return new HeatLoader(this.run.source, this.run.name, value, stat, () => {
      this.failure.value = this.loader.failure;
      this.recolor(this.range.peek());
      this.refresh();
    });
  }

  private refresh(): void {
    const best = this.loader.best();
    this.busy.value = !this.loader.settled();
    // Drawn data stays even if the hub has dropped it.
    const from = Math.min(this.loader.knownFrom, best?.window.step0 ?? Infinity);
    this.knownFrom.value = from > Math.max(this.heat.all.step0, this.heat.window.step0) ? from : null;
    // Unknown cells of the best piece stay empty instead of showing older, coarser values.
    this.heat.show({ pieces: best === null ? this.loader.pieces() : [best] });
    if (best !== null) this.piece.value = best;
  }

  private recolor(before: Range | null): void {
    const best = this.loader.best() ?? this.loader.whole;
    if (best === null || (this.held.peek() && before !== null)) return;
    const range = steadied(before, robustRange(...cellsWithin(best, this.heat.window)));
    if (range === null) return;
    this.range.value = range;
    this.heat.show({ range });
  }
}

function allOf(run: OpenRun): HeatWindow {
  const steps = run.steps.value;
  const status = run.status.value;
  const last = Math.max(steps?.last.at(-1) ?? 0, 0);
  return { step0: steps?.first[0] ?? 0, step1: last + 1, rank0: 0, rank1: Math.max(1, status?.world_size ?? 0, status?.ranks ?? 0) };
}

/** Ranks named by findings, with the worst severity; findings that name most ranks are ignored. */
export function marksOf(run: OpenRun): RankMark[] {
  const found = new Map<number, Severity>();
  const most = Math.max(2, (run.status.value?.ranks ?? 0) / 2);
  for (const severity of WORST) {
    for (const finding of run.findings.value?.findings ?? []) {
      if (finding.severity !== severity || finding.ranks.length > most) continue;
      for (const rank of finding.ranks) if (!found.has(rank)) found.set(rank, severity);
    }
  }
  return [...found].map(([rank, severity]) => ({ rank, severity }));
}
