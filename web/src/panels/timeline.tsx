/**
 * The timeline of a traced step: lanes of threads and streams, zoomed and moved with the mouse, fingers or keys.
 *
 * Ctrl or Shift and the wheel zoom, a sideways wheel and dragging move, a click selects an event, a double click zooms to it.
 * Left and right select the previous and next event of a row, up and down go to other rows.
 */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { TimelineDocument } from "../api/report-document";
import { Fingers, keepPage, pointOn } from "../charts/fingers";
import { heldSpan, movedSpan, zoomedSpan, type Span } from "../charts/span";
import { nameOf, paint, timeAt, xAt } from "../charts/timeline-paint";
import { layoutOf, nearest, placeAt, type Layout, type Place } from "../charts/timeline-rows";
import { Card } from "../ui/card";
import { count, duration } from "../ui/format";
import { theme } from "../ui/theme";
import { LookLegend } from "./report-charts";
import "./timeline.css";

const SMALLEST_NS = 200;
const NEAR_PX = 4;
const DRAG_PX = 4;
const CLOSER = 0.5;

export function TimelineCard({ timeline }: { timeline: TimelineDocument }) {
  const all = useMemo<Span>(() => [0, Math.max(1, timeline.length_ns)], [timeline]);
  const layout = useMemo(() => layoutOf(timeline), [timeline]);
  const [view, setView] = useState<Span>(all);
  const [chosen, setChosen] = useState<Place | null>(null);
  const [pointed, setPointed] = useState<{ place: Place; x: number } | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const colors = theme.value;
  const show = (next: Span): void => setView(heldSpan(next, all, Math.min(SMALLEST_NS, all[1])));
  const zoom = (by: number, at = (view[0] + view[1]) / 2): void => show(zoomedSpan(view, at, by));
  const gestures = useRef({ view, all, layout, show, setChosen, setPointed });
  gestures.current = { view, all, layout, show, setChosen, setPointed };

  useEffect(() => {
    const element = canvas.current;
    if (element === null) return;
    const size = new ResizeObserver(() => setWidth(element.clientWidth));
    size.observe(element);
    const detach = attach(element, gestures);
    return () => {
      size.disconnect();
      detach();
    };
  }, []);

  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context || width === 0) return;
    const scale = devicePixelRatio || 1;
    element.width = Math.round(width * scale);
    element.height = Math.round(layout.height * scale);
    paint(context, { timeline, layout, view, chosen }, width, scale);
  }, [timeline, layout, view, chosen, width, colors]);

  const pressed = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const done = key(event.key, { layout, view, chosen, all, setChosen, show, zoom });
    if (!done) return;
    event.preventDefault();
    event.stopPropagation();
  };

  const tip = pointed ?? (chosen === null ? null : { place: chosen, x: xAt(view, middleOf(layout, chosen, view), width) });
  const used = timeline.looks.filter((_, look) => layout.rows.some((row) => row.look.includes(look)));
  return (
    <Card
      title={timeline.title}
      about={timeline.about}
      part="timeline"
      tools={
        <>
          <button type="button" class="quiet" aria-label="Zoom in" title="Zoom in (+)" onClick={() => zoom(CLOSER)}>
            +
          </button>
          <button type="button" class="quiet" aria-label="Zoom out" title="Zoom out (-)" onClick={() => zoom(1 / CLOSER)}>
            −
          </button>
          <button type="button" class="quiet" onClick={() => setView(all)}>
            Show all
          </button>
        </>
      }
    >
      <div
        class="timeline"
        role="application"
        aria-roledescription="timeline"
        aria-label={`${timeline.title}: ${timeline.about}, ${duration(timeline.length_ns)}. Arrow keys move between events, plus and minus zoom, Home shows all.`}
        tabIndex={0}
        onKeyDown={pressed}
      >
        <canvas ref={canvas} style={{ height: `${layout.height}px` }} />
        {tip !== null && width > 0 && <EventTip timeline={timeline} layout={layout} place={tip.place} x={tip.x} width={width} />}
      </div>
      <p class="hidden" aria-live="polite">
        {chosen === null ? "" : eventWords(timeline, layout, chosen)}
      </p>
      <LookLegend legend={used} />
      <p class="muted small">
        {timeline.note} Drag to move; Ctrl or Shift and the wheel zoom; a click selects an event, a double click zooms to it. Or use the arrow keys, + and −, Enter and Home.
      </p>
    </Card>
  );
}

function EventTip({ timeline, layout, place, x, width }: { timeline: TimelineDocument; layout: Layout; place: Place; x: number; width: number }) {
  const row = layout.rows[place.row];
  if (row === undefined) return null;
  const start = row.start[place.event] ?? 0;
  const lane = timeline.lanes[row.lane];
  const many = row.count[place.event] ?? 1;
  const side = x > width / 2 ? { right: `${Math.max(0, width - x) + 10}px` } : { left: `${Math.max(0, x) + 10}px` };
  return (
    <div class="tip timeline-tip" style={{ ...side, top: `${row.top + row.height + 6}px` }} aria-hidden="true">
      <p class="timeline-name">{nameOf(timeline, row, place.event)}</p>
      <p>
        {duration((row.end[place.event] ?? 0) - start)} <span class="muted">from {duration(start)}</span>
      </p>
      <p class="muted">
        rank {lane?.rank}, {lane?.name}
        {many === 1 && `, ${timeline.looks[row.look[place.event] ?? 0]?.[1] ?? ""}`}
      </p>
    </div>
  );
}

/** The event for screen readers. */
export function eventWords(timeline: TimelineDocument, layout: Layout, { row: at, event }: Place): string {
  const row = layout.rows[at];
  if (row === undefined) return "";
  const lane = timeline.lanes[row.lane];
  const start = row.start[event] ?? 0;
  const level = row.level > 0 ? `, level ${count(row.level + 1)}` : "";
  return `${nameOf(timeline, row, event)}: ${duration((row.end[event] ?? 0) - start)} from ${duration(start)}, rank ${lane?.rank}, ${lane?.name}${level}`;
}

function middleOf(layout: Layout, { row, event }: Place, view: Span): number {
  const start = layout.rows[row]?.start[event] ?? 0;
  const end = layout.rows[row]?.end[event] ?? 0;
  return (Math.max(start, view[0]) + Math.min(end, view[1])) / 2;
}

interface KeyState {
  layout: Layout;
  view: Span;
  chosen: Place | null;
  all: Span;
  setChosen: (place: Place | null) => void;
  show: (span: Span) => void;
  zoom: (by: number, at?: number) => void;
}

/** Whether the key was handled. */
function key(name: string, { layout, view, chosen, all, setChosen, show, zoom }: KeyState): boolean {
  const length = view[1] - view[0];
  const middle = chosen === null ? (view[0] + view[1]) / 2 : middleOf(layout, chosen, view);
  const choose = (place: Place): boolean => {
    setChosen(place);
    const row = layout.rows[place.row];
    const [start, end] = [row?.start[place.event] ?? 0, row?.end[place.event] ?? 0];
    if (end < view[0] || start > view[1]) show(movedSpan(view, all, (start + end) / 2 - (view[0] + view[1]) / 2));
    return true;
  };
  const toRow = (step: number): boolean => {
    for (let row = (chosen?.row ?? (step > 0 ? -1 : layout.rows.length)) + step; row >= 0 && row < layout.rows.length; row += step) {
      const event = nearest(layout.rows[row], middle, length);
      if (event !== null) return choose({ row, event });
    }
    return true;
  };
  const along = (step: number): boolean => {
    if (chosen === null) return toRow(1);
    const last = (layout.rows[chosen.row]?.start.length ?? 1) - 1;
    return choose({ row: chosen.row, event: Math.min(Math.max(0, chosen.event + step), last) });
  };
  switch (name) {
    case "ArrowDown":
      return toRow(1);
    case "ArrowUp":
      return toRow(-1);
    case "ArrowRight":
      return along(1);
    case "ArrowLeft":
      return along(-1);
    case "PageUp":
    case "PageDown":
      show(movedSpan(view, all, (name === "PageDown" ? 0.5 : -0.5) * length));
      return true;
    case "+":
    case "=":
      zoom(CLOSER, middle);
      return true;
    case "-":
      zoom(1 / CLOSER, middle);
      return true;
    case "Home":
      show(all);
      return true;
    case "Enter":
      if (chosen !== null) show(around(layout, chosen));
      return chosen !== null;
    case "Escape":
      setChosen(null);
      return chosen !== null;
  }
  return false;
}

/** An event with some room at both sides. */
function around(layout: Layout, { row, event }: Place): Span {
  const [start, end] = [layout.rows[row]?.start[event] ?? 0, layout.rows[row]?.end[event] ?? 0];
  const room = Math.max(end - start, SMALLEST_NS) * 0.2;
  return [start - room, end + room];
}

interface Gestures {
  view: Span;
  all: Span;
  layout: Layout;
  show: (span: Span) => void;
  setChosen: (place: Place | null) => void;
  setPointed: (at: { place: Place; x: number } | null) => void;
}

/** Mouse and touch gestures on the canvas, until the returned function is called. */
function attach(canvas: HTMLCanvasElement, now: { readonly current: Gestures }): () => void {
  const fingers = new Fingers();
  const stop = new AbortController();
  const { signal } = stop;
  let dragged = 0;
  const time = (x: number): number => timeAt(now.current.view, x, canvas.clientWidth);
  const at = (event: MouseEvent): { place: Place; x: number } | null => {
    const { x, y } = pointOn(canvas, event);
    const near = Math.abs(time(x + NEAR_PX) - time(x));
    const place = x < xAt(now.current.view, now.current.view[0], canvas.clientWidth) ? null : placeAt(now.current.layout, y, time(x), near);
    return place === null ? null : { place, x };
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    fingers.put(event.pointerId, pointOn(canvas, event));
    canvas.setPointerCapture(event.pointerId);
    dragged = 0;
  }, { signal });
  canvas.addEventListener("pointermove", (event) => {
    const point = pointOn(canvas, event);
    const moved = fingers.move(event.pointerId, point);
    if (moved === null) {
      now.current.setPointed(at(event));
      return;
    }
    const { view, all, show, setPointed } = now.current;
    dragged += Math.abs(point.x - moved.before.x);
    if (dragged >= DRAG_PX) setPointed(null);
    if (moved.pinch !== null) {
      const shifted = movedSpan(view, all, time(moved.pinch.from.x) - time(moved.pinch.to.x));
      show(zoomedSpan(shifted, timeAt(shifted, moved.pinch.to.x, canvas.clientWidth), moved.pinch.by));
    } else if (dragged >= DRAG_PX) show(movedSpan(view, all, time(moved.before.x) - time(point.x)));
  }, { signal });
  const up = (event: PointerEvent): void => {
    if (!fingers.lift(event.pointerId) || event.type === "pointercancel" || dragged >= DRAG_PX) return;
    now.current.setChosen(at(event)?.place ?? null);
  };
  canvas.addEventListener("pointerup", up, { signal });
  canvas.addEventListener("pointercancel", up, { signal });
  canvas.addEventListener("pointerleave", () => now.current.setPointed(null), { signal });
  canvas.addEventListener("dblclick", (event) => {
    const found = at(event);
    const { x } = pointOn(canvas, event);
    now.current.show(found === null ? zoomedSpan(now.current.view, time(x), CLOSER) : around(now.current.layout, found.place));
  }, { signal });
  canvas.addEventListener("wheel", (event) => {
    const { view, all, show } = now.current;
    const turn = event.deltaY || event.deltaX;
    if (event.ctrlKey || event.shiftKey) {
      event.preventDefault();
      show(zoomedSpan(view, time(pointOn(canvas, event).x), 0.8 ** (-Math.max(-120, Math.min(120, turn)) / 100)));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      show(movedSpan(view, all, (event.deltaX / Math.max(1, canvas.clientWidth)) * (view[1] - view[0])));
    }
  }, { signal, passive: false });
  keepPage(canvas, { signal });
  return () => stop.abort();
}
