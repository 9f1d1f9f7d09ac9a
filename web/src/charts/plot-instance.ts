/**
 * The uPlot instance of a `Plot`: created once, then updated, and rebuilt only when its series or the theme change.
 *
 * Reports the plotting area and visible x range (`frame`, for the marks), and the cursor position while the cursor is in this
 * chart (`at`, for the tooltip); synchronized charts show only the line.
 */

import { signal } from "@preact/signals";
import uPlot from "uplot";
import { rested } from "./columns";
import { LEAST_STEPS } from "./heat-window";
import { attachFingers, type Movable } from "./plot-fingers";
import { complete } from "./plot-options";
import { ENDLESS, type Span } from "./span";

export interface Chart {
  /** Without size, cursor and axis colors, which `Plot` adds. */
  options: Omit<uPlot.Options, "width" | "height">;
  data: uPlot.AlignedData;
  /**
   * Each value holds from its own x to the next, and the last x only closes the last value, as made by `edges` and `closed`
   * in columns.ts. Otherwise values are points.
   */
  blocks?: boolean;
  /** A new key rebuilds the chart even if the series are the same. */
  key?: string;
}

/** Callbacks and visible range from the owner; read on each use, so that they are never stale. */
export interface Wishes {
  onChoose?: ((x: number) => void) | undefined;
  onStretch?: ((first: number, last: number) => void) | undefined;
  onWhole?: (() => void) | undefined;
  /** Exact visible x range; null or missing: everything. */
  range?: Span | null | undefined;
  /** Full x range, the limit for touch gestures. Missing: unknown. */
  all?: Span | null | undefined;
}

/** In CSS pixels from the left edge of the box. */
export interface Frame {
  left: number;
  width: number;
  top: number;
  height: number;
  least: number;
  most: number;
}

export interface At {
  index: number;
  x: number;
  left: number;
  top: number;
}

/** Smaller pointer movements count as a click. */
const CLICK_PX = 4;
/** Charts out of view are drawn after this delay, so that prints and full-page screenshots include them. */
const UNSEEN_MS = 3000;

export class PlotInstance {
  readonly frame = signal<Frame | null>(null);
  readonly at = signal<At | null>(null);
  wishes: Wishes = {};
  private plot: uPlot | null = null;
  private blocks = false;
  private shape = "";
  private own = false;
  private pressed: number | null = null;
  /** The range during a touch gesture. */
  private fingered: Span | null = null;
  private inSight = true;
  private due: (() => void) | null = null;
  private late: ReturnType<typeof setTimeout> | null = null;

  constructor(private readonly box: HTMLElement) {}

  /** Draw now, or when the chart becomes visible, or after a delay; a new request replaces pending ones. */
  whenSeen(draw: () => void): void {
    if (this.inSight || this.plot === null) {
      this.due = null;
      draw();
      return;
    }
    this.due = draw;
    this.late ??= setTimeout(() => {
      this.late = null;
      this.drawDue();
    }, UNSEEN_MS);
  }

  seen(inSight: boolean): void {
    this.inSight = inSight;
    if (inSight) this.drawDue();
  }

  private drawDue(): void {
    const draw = this.due;
    this.due = null;
    draw?.();
  }

  show(chart: Chart, height: number, theme: string, together: string | undefined): void {
    this.blocks = chart.blocks === true;
    const drags = this.wishes.onStretch !== undefined;
    const shape = JSON.stringify([theme, height, drags, this.blocks, chart.key, chart.options.series.map(looks), chart.options.bands?.length]);
    if (this.plot !== null && this.shape === shape) {
      this.plot.setData(chart.data);
      this.look();
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    const options = complete(chart.options, { width: this.box.clientWidth, height, together, drags, points: !this.blocks }, () => this.fingered ?? this.wishes.range ?? null);
    this.plot = new uPlot(
      {
        ...options,
        hooks: {
          ...options.hooks,
          draw: [...(options.hooks?.draw ?? []), (plot) => this.drawn(plot)],
          setCursor: [...(options.hooks?.setCursor ?? []), () => this.look()],
          setSelect: [(plot) => this.stretched(plot)],
        },
      },
      chart.data,
      this.box,
    );
    this.listen(this.plot.over);
  }

  resize(height: number): void {
    const width = this.box.clientWidth;
    if (this.plot === null || width === 0 || (this.plot.width === width && this.plot.height === height)) return;
    this.plot.setSize({ width, height });
  }

  close(): void {
    this.plot?.destroy();
    this.plot = null;
    this.due = null;
    if (this.late !== null) clearTimeout(this.late);
  }

  /** Handle a key: move the cursor, select, zoom. Returns whether it was handled. */
  key(name: string): boolean {
    const plot = this.plot;
    const xs = plot?.data[0];
    const count = (xs?.length ?? 0) - (this.blocks ? 1 : 0);
    if (plot === null || xs === undefined || count < 1) return false;
    const [from, to] = this.indices(xs, count);
    const at = Math.min(Math.max(this.at.value?.index ?? to, from), to);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: from, End: to }[name];
    if (next !== undefined) {
      this.own = true;
      const index = Math.min(Math.max(from, next), to);
      this.place(plot, plot.valToPos(this.middle(xs, index), "x"), plot.over.clientHeight / 2);
      return true;
    }
    if (name === "Enter" && this.wishes.onChoose !== undefined) {
      this.wishes.onChoose(this.middle(xs, at));
      return true;
    }
    if (name === "Escape" && this.at.value !== null) {
      this.leave();
      return true;
    }
    return (name === "+" || name === "=" || name === "-") && this.zoom(name === "-" ? 2 : 0.5, this.middle(xs, at));
  }

  leave(): void {
    this.own = false;
    this.at.value = null;
    if (this.plot !== null) this.place(this.plot, -10, -10);
  }

  /** Set the cursor here and in synchronized charts; uPlot supports this, but its types do not show it. */
  private place(plot: uPlot, left: number, top: number): void {
    const set = plot.setCursor as (to: { left: number; top: number }, fire: boolean, publish: boolean) => void;
    set({ left, top }, true, true);
  }

  private zoom(factor: number, around: number): boolean {
    const frame = this.frame.value;
    if (frame === null || this.wishes.onStretch === undefined) return false;
    const share = (around - frame.least) / (frame.most - frame.least);
    const length = (frame.most - frame.least) * factor;
    this.wishes.onStretch(around - share * length, around + (1 - share) * length);
    return true;
  }

  /** First and last visible index. */
  private indices(xs: ArrayLike<number>, count: number): [number, number] {
    const frame = this.frame.value;
    if (frame === null) return [0, count - 1];
    let [from, to] = [0, count - 1];
    while (from < to && this.middle(xs, from) < frame.least) from += 1;
    while (to > from && this.middle(xs, to) > frame.most) to -= 1;
    return [from, to];
  }

  private middle(xs: ArrayLike<number>, index: number): number {
    const x = xs[index] ?? 0;
    return this.blocks ? (x + (xs[index + 1] ?? x)) / 2 : x;
  }

  private listen(over: HTMLElement): void {
    over.addEventListener("mouseenter", () => (this.own = true));
    over.addEventListener("mouseleave", () => {
      this.own = false;
      this.at.value = null;
    });
    over.addEventListener("mousedown", (event) => {
      this.pressed = event.clientX;
    });
    over.addEventListener("click", (event) => {
      const plot = this.plot;
      if (plot === null || this.pressed === null || Math.abs(event.clientX - this.pressed) >= CLICK_PX) return;
      const x = plot.posToVal(event.clientX - over.getBoundingClientRect().left, "x");
      const index = this.indexAt(plot, x);
      if (index !== null) this.wishes.onChoose?.(this.blocks ? x : (plot.data[0][index] ?? x));
    });
    over.addEventListener("dblclick", () => this.wishes.onWhole?.());
    attachFingers(over, { movable: () => this.movable(), show: (span) => this.move(span), rested: (span) => this.rest(span) });
  }

  /** The range for touch gestures; a forecast may extend beyond the steps. */
  private movable(): Movable | null {
    const frame = this.frame.value;
    if (frame === null || this.wishes.onStretch === undefined) return null;
    const [from, to] = this.wishes.all ?? ENDLESS;
    const { least, most } = frame;
    return { span: [least, most], all: [Math.min(from, least), Math.max(to, most)], smallest: this.wishes.all ? LEAST_STEPS : 0 };
  }

  private move(span: Span): void {
    if (this.at.value !== null) this.leave();
    this.fingered = span;
    this.plot?.setScale("x", { min: span[0], max: span[1] });
  }

  private rest(span: Span): void {
    this.wishes.onStretch?.(...(this.wishes.all ? rested(span) : span));
    // The owner has updated its range by then; if it is unchanged, reset the chart to it.
    requestAnimationFrame(() => {
      this.fingered = null;
      this.plot?.setData(this.plot.data);
    });
  }

  private look(): void {
    const plot = this.plot;
    const left = plot?.cursor.left ?? -1;
    if (plot === null || !this.own || left < 0) {
      if (this.at.value !== null) this.at.value = null;
      return;
    }
    const x = plot.posToVal(left, "x");
    const index = this.indexAt(plot, x);
    this.at.value = index === null ? null : { index, x, left: left + plot.over.offsetLeft, top: plot.over.offsetTop + (plot.cursor.top ?? 0) };
  }

  private indexAt(plot: uPlot, x: number): number | null {
    const xs = plot.data[0];
    if (xs.length === 0 || x !== x) return null;
    const nearest = plot.valToIdx(x);
    if (!this.blocks) return nearest;
    const index = (xs[nearest] ?? 0) > x ? nearest - 1 : nearest;
    return index < 0 || index > xs.length - 2 ? null : index;
  }

  private drawn(plot: uPlot): void {
    const { min, max } = plot.scales["x"] ?? {};
    if (min === undefined || max === undefined || min === null || max === null) return;
    const next: Frame = {
      left: plot.bbox.left / uPlot.pxRatio,
      width: plot.bbox.width / uPlot.pxRatio,
      top: plot.bbox.top / uPlot.pxRatio,
      height: plot.bbox.height / uPlot.pxRatio,
      least: min,
      most: max,
    };
    const before = this.frame.value;
    if (before === null || (Object.keys(next) as (keyof Frame)[]).some((name) => before[name] !== next[name])) this.frame.value = next;
  }

  private stretched(plot: uPlot): void {
    const { left, width } = plot.select;
    if (width === 0) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width >= CLICK_PX) this.wishes.onStretch?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }
}

/** Properties of a series that require a rebuild. */
function looks(series: uPlot.Series): unknown[] {
  const { label, scale, show, width, dash, stroke, fill } = series;
  return [label, scale, show, width, dash, typeof stroke === "function" ? "" : stroke, typeof fill === "function" ? "" : fill];
}
