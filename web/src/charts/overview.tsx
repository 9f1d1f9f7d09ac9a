/**
 * The whole run as a narrow strip with the visible window: drag it, drag its edges, or drag outside it to select a new one.
 * Arrow keys move it, plus and minus zoom, Home and End go to the ends, Escape shows everything.
 */

import { useEffect, useRef } from "preact/hooks";
import type { View } from "../run/open-run";
import { count } from "../ui/format";
import { theme, token } from "../ui/theme";
import "./overview.css";
import { moved, newest, resized, unlessAll, zoomed } from "./window";

interface OverviewProps {
  /** First step and value of each bin. */
  first: readonly number[];
  values: readonly number[];
  whole: View;
  view: View | null;
  onView: (view: View | null) => void;
}

const HEIGHT = 34;
const EDGE_PX = 8;

export function Overview({ first, values, whole, view, onView }: OverviewProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const strip = useRef<HTMLDivElement>(null);
  const drag = useRef<Drag | null>(null);
  const now = theme.value;
  useEffect(() => {
    const place = canvas.current;
    if (place === null) return;
    const draw = (): void => paint(place, first, values, whole);
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(place);
    return () => watch.disconnect();
  }, [first, values, now]);

  const shown = view ?? whole;
  const length = whole.last - whole.first + 1;
  const stepAt = (event: PointerEvent): number => {
    const box = strip.current?.getBoundingClientRect();
    return box === undefined || box.width === 0 ? whole.first : whole.first - 0.5 + ((event.clientX - box.left) / box.width) * length;
  };
  const down = (event: PointerEvent): void => {
    const box = strip.current?.getBoundingClientRect();
    if (box === undefined || event.button !== 0) return;
    const at = stepAt(event);
    const perPixel = length / Math.max(1, box.width);
    drag.current = begun(view, at, perPixel * EDGE_PX);
    strip.current?.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent): void => {
    if (drag.current !== null) onView(unlessAll(dragged(drag.current, stepAt(event), whole), whole));
  };
  const up = (): void => {
    drag.current = null;
  };
  const pressed = (event: KeyboardEvent): void => {
    const next = keyed(event.key, shown, whole);
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    onView(next === null ? null : unlessAll(next, whole));
    event.preventDefault();
    event.stopPropagation();
  };
  const share = (step: number): string => `${((step - whole.first) / length) * 100}%`;
  return (
    <div class="overview" ref={strip} onPointerDown={down} onPointerMove={move} onPointerUp={up} onPointerCancel={up} onDblClick={() => onView(null)}>
      <canvas ref={canvas} aria-hidden="true" />
      {view !== null && <div class="overview-shade" style={{ left: 0, width: share(shown.first) }} />}
      {view !== null && <div class="overview-shade" style={{ left: share(shown.last + 1), right: 0 }} />}
      <div
        class={`overview-window${view === null ? " all" : ""}`}
        style={{ left: share(shown.first), width: share(whole.first + shown.last - shown.first + 1) }}
        role="slider"
        tabIndex={0}
        aria-label="Visible steps; arrow keys move, plus and minus zoom, Escape shows all"
        aria-valuemin={whole.first}
        aria-valuemax={whole.last}
        aria-valuenow={shown.first}
        aria-valuetext={view === null ? `all ${count(length)} steps` : `steps ${count(shown.first)} to ${count(shown.last)}`}
        onKeyDown={pressed}
      />
    </div>
  );
}

export type Drag = { kind: "move"; from: number; view: View } | { kind: "edge"; edge: "first" | "last"; view: View } | { kind: "new"; from: number };

/** The drag that starts at a step; `reach`: how close, in steps, a pointer grabs an edge. */
export function begun(view: View | null, at: number, reach: number): Drag {
  if (view === null) return { kind: "new", from: at };
  const [left, right] = [view.first - 0.5, view.last + 0.5];
  if (Math.abs(at - right) <= reach && at >= (left + right) / 2) return { kind: "edge", edge: "last", view };
  if (Math.abs(at - left) <= reach) return { kind: "edge", edge: "first", view };
  if (at > left && at < right) return { kind: "move", from: at, view };
  return { kind: "new", from: at };
}

export function dragged(drag: Drag, at: number, whole: View): View {
  if (drag.kind === "move") return moved(drag.view, at - drag.from, whole);
  if (drag.kind === "edge") return resized(drag.view, drag.edge, at, whole);
  return resized({ first: Math.round(drag.from), last: Math.round(drag.from) }, at < drag.from ? "first" : "last", at, whole);
}

/** Undefined: key not handled; null: show everything. */
export function keyed(key: string, view: View, whole: View): View | null | undefined {
  const length = view.last - view.first + 1;
  const by = Math.max(1, Math.round(length / 10));
  switch (key) {
    case "ArrowLeft":
      return moved(view, -by, whole);
    case "ArrowRight":
      return moved(view, by, whole);
    case "PageUp":
      return moved(view, -length, whole);
    case "PageDown":
      return moved(view, length, whole);
    case "Home":
      return moved(view, whole.first - view.first, whole);
    case "End":
      return newest(length, whole);
    case "+":
    case "=":
      return zoomed(view, 0.5, whole);
    case "-":
      return zoomed(view, 2, whole);
    case "Escape":
      return null;
    default:
      return undefined;
  }
}

function paint(canvas: HTMLCanvasElement, first: readonly number[], values: readonly number[], whole: View): void {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(HEIGHT * ratio)];
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const draw = canvas.getContext("2d");
  if (draw === null || width === 0) return;
  draw.clearRect(0, 0, width, height);
  const sorted = values.filter((value) => Number.isFinite(value)).sort((one, two) => one - two);
  // Cut outliers at the top, so that a compiling step does not flatten the rest.
  const top = Math.min(sorted.at(-1) ?? 1, 1.6 * (sorted[Math.floor(sorted.length * 0.98)] ?? 1)) || 1;
  draw.fillStyle = token("--muted");
  draw.globalAlpha = 0.5;
  const length = whole.last - whole.first + 1;
  for (let at = 0; at < first.length; at += 1) {
    const from = Math.round((((first[at] ?? 0) - whole.first) / length) * width);
    const to = Math.round((((first[at + 1] ?? whole.last + 1) - whole.first) / length) * width);
    const tall = Math.min(1, (values[at] ?? 0) / top) * (height - ratio);
    draw.fillRect(from, height - tall, to - from, tall);
  }
  draw.globalAlpha = 1;
}
