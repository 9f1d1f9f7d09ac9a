/**
 * The canvas of the map: keeps the visible window, draws it at most once per frame, and applies movements.
 *
 * The view moves at once with the loaded pieces; `rested` is called shortly after the last movement, so that other charts,
 * the address and the hub need not follow each pixel.
 */

import { HeatPicture, type Scene } from "./heat-picture";
import { held, moved, pointAt, rested, same, showing, zoomed, type At, type Box, type HeatWindow } from "./heat-window";
import { axisLeft, RIGHT_PX } from "./margins";

export interface HeatHooks {
  /** The visible part or its size in pixels changed. */
  seen: (window: HeatWindow, pixels: { width: number; height: number }) => void;
  /** The view came to rest. */
  rested: (window: HeatWindow) => void;
}

const TOP = 4;
const BOTTOM = 24;
const REST_MS = 160;

export class HeatCanvas {
  window: HeatWindow;
  all: HeatWindow;
  box: Box = { left: 0, top: TOP, width: 1, height: 1 };
  /** Drawing time of the last frame in milliseconds, for measurements. */
  drawMs = 0;

  private readonly picture: HeatPicture;
  private scene: Scene | null = null;
  private frame = 0;
  private restTimer: ReturnType<typeof setTimeout> | null = null;
  private scale = 1;

  constructor(
    readonly canvas: HTMLCanvasElement,
    context: CanvasRenderingContext2D,
    all: HeatWindow,
    private readonly hooks: HeatHooks,
  ) {
    this.picture = new HeatPicture(context);
    this.all = this.window = all;
  }

  close(): void {
    cancelAnimationFrame(this.frame);
    if (this.restTimer !== null) clearTimeout(this.restTimer);
  }

  /** The size of the element or the pixel density changed. */
  resize(width: number, height: number, scale: number): void {
    const left = axisLeft(width);
    this.scale = scale;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.box = { left, top: TOP, width: Math.max(1, width - left - RIGHT_PX), height: Math.max(1, height - TOP - BOTTOM) };
    this.changed();
  }

  show(change: Partial<Scene>): void {
    this.scene = { ...this.scene, ...change } as Scene;
    this.due();
  }

  /** The total range changed; `window` null: keep the visible part. */
  reach(all: HeatWindow, window: HeatWindow | null): void {
    this.all = all;
    const next = held(window ?? this.window, all);
    if (this.moving() || same(next, this.window)) return;
    this.window = next;
    this.changed();
  }

  /** Whether the user is moving it. */
  moving(): boolean {
    return this.restTimer !== null;
  }

  move(window: HeatWindow): void {
    this.window = held(window, this.all);
    this.changed();
    if (this.restTimer !== null) clearTimeout(this.restTimer);
    this.restTimer = setTimeout(() => {
      this.restTimer = null;
      this.window = rested(this.window, this.all);
      this.changed();
      this.hooks.rested(this.window);
    }, REST_MS);
  }

  moveBy(steps: number, ranks: number): void {
    this.move(moved(this.window, this.all, steps, ranks));
  }

  zoom(by: { steps: number; ranks: number }, at: At = this.middle()): void {
    this.move(zoomed(this.window, this.all, at, by));
  }

  /** Move so that the cell is visible. */
  follow(at: At): void {
    const next = showing(this.window, this.all, at);
    if (!same(next, this.window)) this.move(next);
  }

  at(x: number, y: number): At | null {
    return pointAt(this.window, this.box, x, y);
  }

  middle(): At {
    return { step: (this.window.step0 + this.window.step1) / 2, rank: (this.window.rank0 + this.window.rank1) / 2 };
  }

  pixels(): { width: number; height: number } {
    return { width: Math.floor(this.box.width * this.scale), height: Math.floor(this.box.height * this.scale) };
  }

  private changed(): void {
    this.hooks.seen(this.window, this.pixels());
    this.due();
  }

  private due(): void {
    if (this.frame !== 0) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.scene === null) return;
      const began = performance.now();
      this.picture.draw(this.scene, this.window, this.box, this.scale);
      this.drawMs = performance.now() - began;
    });
  }
}
