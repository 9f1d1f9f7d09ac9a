/**
 * Draws the map of ranks and steps: the images of its pieces, axes, marks of findings, host boundaries, the selection and
 * the pointer.
 */

import type { Severity } from "../api/documents";
import { count } from "../ui/format";
import { STOPS, shades, type Range } from "./color-scale";
import { HeatPaint } from "./heat-paint";
import { stretches, type Cell, type Piece } from "./heat-piece";
import { ticks, xOf, yOf, type Box, type HeatWindow } from "./heat-window";

export interface Inks {
  text: string;
  muted: string;
  line: string;
  card: string;
  accent: string;
  none: string;
  hatch: string;
  critical: string;
  warning: string;
  info: string;
  shades: Uint32Array;
}

/** The colors of the current theme; `token` reads one of styles/tokens.css. */
export function inksOf(token: (name: string) => string): Inks {
  return {
    text: token("--text"),
    muted: token("--muted"),
    line: token("--line"),
    card: token("--card"),
    accent: token("--accent"),
    none: token("--heat-none"),
    hatch: token("--heat-hatch"),
    critical: token("--critical"),
    warning: token("--warning"),
    info: token("--info"),
    shades: shades(Array.from({ length: STOPS }, (_none, at) => token(`--heat-${at}`))),
  };
}

export interface RankMark {
  rank: number;
  severity: Severity;
}

export interface Span {
  name: string;
  first: number;
  last: number;
}

export interface Scene {
  pieces: Piece[];
  range: Range | null;
  inks: Inks;
  marks: RankMark[];
  /** Ranks of each node; empty if there is only one. */
  nodes: Span[];
  rank: number | null;
  step: number | null;
  pointed: Cell | null;
  /** The cursor of other charts. */
  linkedStep: number | null;
  /** The rectangle being selected, in CSS pixels. */
  stretch: Box | null;
}

const MOST_MARKS = 400;

export class HeatPicture {
  private readonly paint = new HeatPaint();
  private pattern: { of: string; fill: CanvasPattern | null } = { of: "", fill: null };

  constructor(private readonly context: CanvasRenderingContext2D) {}

  draw(scene: Scene, window: HeatWindow, box: Box, scale: number): void {
    const { context } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, context.canvas.width, context.canvas.height);
    context.save();
    context.beginPath();
    context.rect(Math.round(box.left * scale), Math.round(box.top * scale), Math.round(box.width * scale), Math.round(box.height * scale));
    context.clip();
    this.drawPieces(scene, window, box, scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.drawNodeLines(scene, window, box);
    this.drawChosen(scene, window, box);
    context.restore();
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.drawAxes(scene, window, box);
    this.drawMarks(scene, window, box);
  }

  private drawPieces({ pieces, range, inks }: Scene, window: HeatWindow, box: Box, scale: number): void {
    const shown = range === null ? null : this.paint.shown(pieces, window, range, inks.shades);
    if (shown?.hidden !== true) {
      this.context.fillStyle = this.hatched(inks, scale);
      this.context.fillRect(box.left * scale, box.top * scale, box.width * scale, box.height * scale);
    }
    if (shown === null || range === null) return;
    this.context.imageSmoothingEnabled = false;
    for (const piece of shown.pieces) this.drawPiece(piece, this.paint.picture(piece, range, inks.shades), window, box, scale);
  }

  private drawPiece({ heat }: Piece, picture: HTMLCanvasElement, window: HeatWindow, box: Box, scale: number): void {
    for (const columns of stretches(heat.firstSteps, heat.lastSteps)) {
      const [from, to] = seenCells(columns, window.step0, window.step1);
      if (to <= from) continue;
      const width = (columns.end - columns.start) / (columns.to - columns.from);
      const left = Math.round(xOf(window, box, columns.start + (from - columns.from) * width) * scale);
      const right = Math.round(xOf(window, box, columns.start + (to - columns.from) * width) * scale);
      for (const rows of stretches(heat.firstRanks, heat.lastRanks)) {
        const [above, below] = seenCells(rows, window.rank0, window.rank1);
        if (below <= above) continue;
        const height = (rows.end - rows.start) / (rows.to - rows.from);
        const top = Math.round(yOf(window, box, rows.start + (above - rows.from) * height) * scale);
        const bottom = Math.round(yOf(window, box, rows.start + (below - rows.from) * height) * scale);
        this.context.drawImage(picture, from, above, to - from, below - above, left, top, Math.max(1, right - left), Math.max(1, bottom - top));
      }
    }
  }

  /** Pattern for cells without data. */
  private hatched(inks: Inks, scale: number): CanvasPattern | string {
    const of = `${inks.none} ${inks.hatch} ${scale}`;
    if (this.pattern.of !== of) {
      const tile = document.createElement("canvas");
      const size = Math.round(7 * scale);
      tile.width = tile.height = size;
      const context = tile.getContext("2d");
      if (context !== null) {
        context.fillStyle = inks.none;
        context.fillRect(0, 0, size, size);
        context.strokeStyle = inks.hatch;
        context.lineWidth = scale;
        for (const shift of [-size, 0, size]) {
          context.beginPath();
          context.moveTo(shift, size);
          context.lineTo(shift + size, 0);
          context.stroke();
        }
      }
      this.pattern = { of, fill: this.context.createPattern(tile, "repeat") };
    }
    return this.pattern.fill ?? inks.none;
  }

  private drawNodeLines({ nodes, inks }: Scene, window: HeatWindow, box: Box): void {
    if (nodes.length < 2 || (box.height / (window.rank1 - window.rank0)) * leastSpan(nodes) < 4) return;
    this.context.fillStyle = inks.card;
    for (const node of nodes) {
      if (node.first > window.rank0 && node.first < window.rank1) this.context.fillRect(box.left, Math.round(yOf(window, box, node.first)) - 1, box.width, 1.5);
    }
  }

  private drawChosen(scene: Scene, window: HeatWindow, box: Box): void {
    const { context } = this;
    const { inks } = scene;
    const framed = (x: number, y: number, width: number, height: number): void => {
      context.lineWidth = 3;
      context.strokeStyle = inks.card;
      context.strokeRect(x, y, width, height);
      context.lineWidth = 1.5;
      context.strokeStyle = inks.text;
      context.strokeRect(x, y, width, height);
    };
    if (scene.rank !== null) {
      const top = yOf(window, box, scene.rank);
      const height = Math.max(3, yOf(window, box, scene.rank + 1) - top);
      framed(box.left - 4, top, box.width + 8, height);
    }
    if (scene.step !== null) this.drawStep(scene.step, inks.text, 1.5, window, box);
    if (scene.linkedStep !== null) this.drawStep(scene.linkedStep, inks.muted, 1, window, box);
    if (scene.pointed !== null) {
      const { firstRank, lastRank, firstStep, lastStep } = scene.pointed;
      const [left, top] = [xOf(window, box, firstStep), yOf(window, box, firstRank)];
      const [width, height] = [Math.max(2, xOf(window, box, lastStep + 1) - left), Math.max(2, yOf(window, box, lastRank + 1) - top)];
      // Lines only: a tint would change the colors of the legend.
      context.globalAlpha = 0.6;
      context.fillStyle = inks.text;
      for (const y of [top, top + height]) context.fillRect(box.left, y - 0.5, box.width, 1);
      for (const x of [left, left + width]) context.fillRect(x - 0.5, box.top, 1, box.height);
      context.globalAlpha = 1;
      framed(left, top, width, height);
    }
    if (scene.stretch !== null) {
      const { left, top, width, height } = scene.stretch;
      context.globalAlpha = 0.2;
      context.fillStyle = inks.accent;
      context.fillRect(left, top, width, height);
      context.globalAlpha = 1;
      framed(left, top, width, height);
    }
  }

  private drawStep(step: number, color: string, width: number, window: HeatWindow, box: Box): void {
    const x = (xOf(window, box, step) + xOf(window, box, step + 1)) / 2;
    this.context.globalAlpha = 0.7;
    this.context.fillStyle = this.context.strokeStyle = color;
    this.context.fillRect(x - width / 2, box.top, width, box.height);
    this.context.globalAlpha = 1;
  }

  private drawAxes({ inks, nodes }: Scene, window: HeatWindow, box: Box): void {
    const { context } = this;
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = inks.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const rank of ticks(window.rank0, window.rank1, Math.max(1, box.height / 26))) {
      const y = (yOf(window, box, rank) + yOf(window, box, rank + 1)) / 2;
      if (y >= box.top && y <= box.top + box.height) context.fillText(count(rank), box.left - 14, Math.max(y, box.top + 6));
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    for (const step of ticks(window.step0, window.step1, Math.max(1, box.width / 90))) {
      const x = xOf(window, box, step + 0.5);
      context.fillRect(Math.round(x), box.top + box.height + 1, 1, 4);
      context.fillText(count(step), x, box.top + box.height + 7);
    }
    if (nodes.length < 2) return;
    context.textBaseline = "top";
    for (const node of nodes) {
      const top = Math.max(box.top, yOf(window, box, node.first));
      const bottom = Math.min(box.top + box.height, yOf(window, box, node.last + 1));
      if (bottom - top < 26) continue;
      context.fillStyle = inks.line;
      context.fillRect(18, top + 1, 2, bottom - top - 2);
      context.fillStyle = inks.muted;
      context.save();
      context.translate(2, (top + bottom) / 2);
      context.rotate(-Math.PI / 2);
      context.fillText(shortened(node.name, Math.floor((bottom - top) / 6.6)), 0, 1);
      context.restore();
    }
  }

  /** A shape for each severity, in addition to the color. */
  private drawMarks({ marks, inks }: Scene, window: HeatWindow, box: Box): void {
    const { context } = this;
    const x = box.left - 3;
    for (const { rank, severity } of marks.filter((mark) => mark.rank + 1 > window.rank0 && mark.rank < window.rank1).slice(0, MOST_MARKS)) {
      const y = (yOf(window, box, rank) + yOf(window, box, rank + 1)) / 2;
      context.fillStyle = inks[severity];
      context.beginPath();
      if (severity === "info") context.arc(x - 4, y, 3, 0, 2 * Math.PI);
      else {
        const size = severity === "critical" ? 5 : 4;
        context.moveTo(x, y);
        context.lineTo(x - 8, y - size);
        context.lineTo(x - 8, y + size);
        context.closePath();
      }
      context.fill();
    }
  }
}

/** The cells of a run that lie within `from` to `to`. */
function seenCells(stretch: { from: number; to: number; start: number; end: number }, from: number, to: number): [number, number] {
  const width = (stretch.end - stretch.start) / (stretch.to - stretch.from);
  const first = stretch.from + Math.max(0, Math.floor((from - stretch.start) / width));
  const last = stretch.from + Math.min(stretch.to - stretch.from, Math.ceil((to - stretch.start) / width));
  return [first, last];
}

function leastSpan(nodes: readonly Span[]): number {
  return nodes.reduce((least, node) => Math.min(least, node.last - node.first + 1), Infinity);
}

function shortened(name: string, most: number): string {
  return name.length <= most ? name : `${name.slice(0, Math.max(1, most - 1))}…`;
}
