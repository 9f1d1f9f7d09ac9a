/**
 * Pieces of the map as images, one pixel per cell, and which of them must be drawn.
 *
 * An image is made once per color range. Hidden images are not drawn: if a piece has every visible cell, a frame is a single
 * stretched image.
 */

import { colored, type Range } from "./color-scale";
import { stretches, type Piece } from "./heat-piece";
import type { HeatWindow } from "./heat-window";

interface Painted {
  canvas: HTMLCanvasElement;
  with: string;
  /** It is fully opaque. */
  solid: boolean;
}

export class HeatPaint {
  private readonly painted = new WeakMap<Piece, Painted>();

  /** The visible ones in drawing order; `hidden`: they fully cover what lies below. */
  shown(pieces: readonly Piece[], window: HeatWindow, range: Range, shades: Uint32Array): { pieces: Piece[]; hidden: boolean } {
    const found: Piece[] = [];
    for (const piece of pieces.toReversed()) {
      if (!touches(piece.window, window)) continue;
      found.unshift(piece);
      if (covers(piece.window, window) && this.of(piece, range, shades).solid) return { pieces: found, hidden: true };
    }
    return { pieces: found, hidden: false };
  }

  picture(piece: Piece, range: Range, shades: Uint32Array): HTMLCanvasElement {
    return this.of(piece, range, shades).canvas;
  }

  private of(piece: Piece, range: Range, shades: Uint32Array): Painted {
    const { heat } = piece;
    const made = `${range.low} ${range.high} ${shades[0]}`;
    const known = this.painted.get(piece);
    if (known?.with === made) return known;
    const canvas = known?.canvas ?? document.createElement("canvas");
    canvas.width = heat.firstSteps.length;
    canvas.height = heat.firstRanks.length;
    const image = new ImageData(canvas.width, canvas.height);
    const whole = colored(heat.cells, range, shades, new Uint32Array(image.data.buffer));
    canvas.getContext("2d")?.putImageData(image, 0, 0);
    const solid = whole && gapless(heat.firstSteps, heat.lastSteps) && gapless(heat.firstRanks, heat.lastRanks);
    const painted = { canvas, with: made, solid };
    this.painted.set(piece, painted);
    return painted;
  }
}

function touches(piece: HeatWindow, window: HeatWindow): boolean {
  return piece.step1 > window.step0 && piece.step0 < window.step1 && piece.rank1 > window.rank0 && piece.rank0 < window.rank1;
}

function covers(piece: HeatWindow, window: HeatWindow): boolean {
  return piece.step0 <= window.step0 && piece.step1 >= window.step1 && piece.rank0 <= window.rank0 && piece.rank1 >= window.rank1;
}

function gapless(first: Uint32Array, last: Uint32Array): boolean {
  return stretches(first, last).every((stretch, at, all) => at === 0 || stretch.start === all[at - 1]?.end);
}
