/** Draws a timeline on a canvas: axis, names of lanes, and the events in the visible span. */

import type { TimelineDocument } from "../api/report-document";
import { cutText, duration, tick } from "../ui/format";
import { token } from "../ui/theme";
import { lookProperty } from "./looks";
import type { Span } from "./span";
import { AXIS_PX, ticksOf, visible, type Layout, type Place, type Row } from "./timeline-rows";

const FONT = "11px system-ui, sans-serif";
const BOLD = "600 12px system-ui, sans-serif";
const LETTER_PX = 6;
const TICK_PX = 100;
/** Narrower events have no name in them. */
const NAMED_PX = 30;
const RIGHT_PX = 12;

export interface Scene {
  timeline: TimelineDocument;
  layout: Layout;
  view: Span;
  chosen: Place | null;
}

/** Space for the names of lanes. */
export function namesWidth(width: number): number {
  return width < 560 ? 76 : 150;
}

export function timeAt(view: Span, x: number, width: number): number {
  const left = namesWidth(width);
  return view[0] + ((x - left) / Math.max(1, width - left - RIGHT_PX)) * (view[1] - view[0]);
}

export function xAt(view: Span, time: number, width: number): number {
  const left = namesWidth(width);
  return left + ((time - view[0]) / (view[1] - view[0])) * Math.max(1, width - left - RIGHT_PX);
}

/** `width` in CSS pixels, `scale`: device pixels in one of them. */
export function paint(context: CanvasRenderingContext2D, scene: Scene, width: number, scale: number): void {
  const { timeline, layout, view, chosen } = scene;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, layout.height);
  paintAxis(context, scene, width);
  const looks = timeline.looks.map(([look]) => new Color(token(lookProperty(look))));
  context.save();
  context.beginPath();
  context.rect(namesWidth(width), AXIS_PX, width - namesWidth(width) - RIGHT_PX, layout.height);
  context.clip();
  context.font = FONT;
  context.textBaseline = "middle";
  for (const row of layout.rows) paintRow(context, timeline, row, view, width, looks);
  const row = chosen === null ? undefined : layout.rows[chosen.row];
  if (row !== undefined && chosen !== null) {
    const [from, to] = [xAt(view, row.start[chosen.event] ?? 0, width), xAt(view, row.end[chosen.event] ?? 0, width)];
    context.strokeStyle = token("--text");
    context.lineWidth = 2;
    context.strokeRect(from - 1, row.top - 1, Math.max(2, to - from) + 2, row.height + 2);
  }
  context.restore();
  paintNames(context, layout, width);
}

function paintAxis(context: CanvasRenderingContext2D, { timeline, layout, view }: Scene, width: number): void {
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "center";
  context.fillStyle = token("--muted");
  context.strokeStyle = token("--grid");
  context.lineWidth = 1;
  for (const at of ticksOf(view, width / TICK_PX)) {
    const x = Math.round(xAt(view, at, width)) + 0.5;
    context.beginPath();
    context.moveTo(x, AXIS_PX);
    context.lineTo(x, layout.height);
    context.stroke();
    context.fillText(tick(at, duration), Math.min(x, width - 24), AXIS_PX / 2);
  }
  context.strokeStyle = token("--accent");
  context.textAlign = "left";
  for (const [at, name] of timeline.marks) {
    if (at < view[0] || at > view[1]) continue;
    const x = Math.round(xAt(view, at, width)) + 0.5;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, AXIS_PX);
    context.lineTo(x, layout.height);
    context.stroke();
    context.setLineDash([]);
    context.fillText(name, x + 4, AXIS_PX + 11);
  }
}

function paintNames(context: CanvasRenderingContext2D, layout: Layout, width: number): void {
  const letters = Math.floor((namesWidth(width) - 8) / LETTER_PX);
  context.textBaseline = "middle";
  for (const heading of layout.headings) {
    context.font = heading.rank ? BOLD : FONT;
    context.fillStyle = token(heading.rank ? "--text" : "--muted");
    context.fillText(cutText(heading.text, heading.rank ? letters * 2 : letters), 0, heading.top + (heading.rank ? heading.height / 2 : 8), namesWidth(width) - 6);
  }
}

function paintRow(context: CanvasRenderingContext2D, timeline: TimelineDocument, row: Row, view: Span, width: number, looks: readonly Color[]): void {
  const [first, last] = visible(row, view);
  let drawn = -Infinity;
  const edge = namesWidth(width);
  for (let at = first; at < last; at += 1) {
    const from = xAt(view, row.start[at] ?? 0, width);
    const to = xAt(view, row.end[at] ?? 0, width);
    // Of several events in half a pixel the first is enough.
    if (to < drawn + 0.5) continue;
    const color = looks[row.look[at] ?? 0];
    const wide = Math.max(0.6, to - from - (to - from > 3 ? 0.6 : 0));
    context.fillStyle = color?.text ?? "";
    context.globalAlpha = (row.count[at] ?? 1) > 1 ? 0.6 : 1;
    context.fillRect(from, row.top, wide, row.height);
    context.globalAlpha = 1;
    drawn = to;
    const left = Math.max(from, edge);
    const room = to - left;
    if (room > NAMED_PX) {
      context.fillStyle = color?.over ?? "";
      context.fillText(cutText(nameOf(timeline, row, at), Math.floor((room - 6) / LETTER_PX)), left + 3, row.top + row.height / 2 + 0.5, room - 5);
    }
  }
}

/** The name of an event, or how many it represents. */
export function nameOf(timeline: TimelineDocument, row: Row, at: number): string {
  const many = row.count[at] ?? 1;
  return many > 1 ? `${many.toLocaleString("en-GB")} short events` : (timeline.names[row.label[at] ?? -1] ?? "");
}

/** A color, and a readable one for text on it. */
class Color {
  readonly over: string;

  constructor(readonly text: string) {
    const parts = /^#(..)(..)(..)$/.exec(text)?.slice(1) ?? [];
    const [red = 0, green = 0, blue = 0] = parts.map((part) => (Number.parseInt(part, 16) / 255) ** 2.2);
    this.over = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "black" : "white";
  }
}
