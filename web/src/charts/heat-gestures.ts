/**
 * Mouse and touch gestures on the map.
 *
 * Dragging selects a range, as in the charts above, or moves the map, depending on the mode (Alt: the other one). Ctrl+wheel
 * zooms, Shift+wheel zooms steps only, a sideways wheel moves along the steps. Two fingers zoom and move, one finger moves
 * sideways. The plain wheel and vertical movement of one finger scroll the page.
 */

import { Fingers, keepPage, pointOn, type Pinch, type Point } from "./fingers";
import type { HeatCanvas } from "./heat-canvas";
import { rankAtY, stepAtX, type At, type Box } from "./heat-window";

export type DragMode = "choose" | "move";

export interface GestureHooks {
  mode: () => DragMode;
  /** The cell under the pointer; null: none. */
  pointed: (at: At | null, x: number, y: number) => void;
  chosen: (at: At) => void;
  /** The rectangle being selected. */
  stretch: (box: Box | null) => void;
}

const NEARER = 0.8;
/** From this many pixels on it is a drag, below a click. */
const DRAG = 5;
/** A rectangle lower than this selects only steps, one narrower only ranks. */
const FLAT = 10;

interface Drag {
  x: number;
  y: number;
  mode: DragMode;
  dragged: boolean;
}

/** Active until the returned function is called. */
export function attachGestures(heat: HeatCanvas, hooks: GestureHooks): () => void {
  const { canvas } = heat;
  const fingers = new Fingers();
  let drag: Drag | null = null;

  const place = (event: MouseEvent): Point => pointOn(canvas, event);

  const down = (event: PointerEvent): void => {
    if (event.button !== 0) return;
    const { x, y } = place(event);
    fingers.put(event.pointerId, { x, y });
    canvas.setPointerCapture(event.pointerId);
    const other: DragMode = hooks.mode() === "choose" ? "move" : "choose";
    const mode = event.pointerType === "touch" ? "move" : event.altKey ? other : hooks.mode();
    drag = fingers.count === 1 && heat.at(x, y) !== null ? { x, y, mode, dragged: false } : null;
  };

  const move = (event: PointerEvent): void => {
    const { x, y } = place(event);
    const moved = fingers.move(event.pointerId, { x, y });
    if (moved !== null && moved.pinch !== null) {
      pinch(moved.pinch);
      return;
    }
    if (drag === null || moved === null) {
      hooks.pointed(heat.at(x, y), x, y);
      return;
    }
    drag.dragged ||= Math.hypot(x - drag.x, y - drag.y) >= DRAG;
    if (!drag.dragged) return;
    hooks.pointed(null, x, y);
    if (drag.mode === "move") slide(moved.before, { x, y });
    else hooks.stretch(rectangle(heat.box, drag, { x, y }));
  };

  const up = (event: PointerEvent): void => {
    const { x, y } = place(event);
    fingers.lift(event.pointerId);
    const was = drag;
    drag = null;
    if (was === null || event.type === "pointercancel") {
      hooks.stretch(null);
      return;
    }
    if (!was.dragged) {
      const at = heat.at(was.x, was.y);
      if (at !== null) hooks.chosen(at);
    } else if (was.mode === "choose") {
      hooks.stretch(null);
      take(rectangle(heat.box, was, { x, y }));
    }
  };

  const slide = (from: Point, to: Point): void => {
    heat.moveBy(
      stepAtX(heat.window, heat.box, from.x) - stepAtX(heat.window, heat.box, to.x),
      rankAtY(heat.window, heat.box, from.y) - rankAtY(heat.window, heat.box, to.y),
    );
  };

  const pinch = ({ from, to, by }: Pinch): void => {
    slide(from, to);
    heat.zoom({ steps: by, ranks: by }, { step: stepAtX(heat.window, heat.box, to.x), rank: rankAtY(heat.window, heat.box, to.y) });
  };

  const take = (chosen: Box): void => {
    const { window, box } = heat;
    const flat = chosen.height < Math.min(FLAT, box.height / 3);
    const thin = chosen.width < FLAT;
    if (flat && thin) return;
    heat.move({
      step0: thin ? window.step0 : Math.floor(stepAtX(window, box, chosen.left)),
      step1: thin ? window.step1 : Math.ceil(stepAtX(window, box, chosen.left + chosen.width)),
      rank0: flat ? window.rank0 : Math.floor(rankAtY(window, box, chosen.top)),
      rank1: flat ? window.rank1 : Math.ceil(rankAtY(window, box, chosen.top + chosen.height)),
    });
  };

  const wheel = (event: WheelEvent): void => {
    const { x, y } = place(event);
    const at = { step: stepAtX(heat.window, heat.box, x), rank: rankAtY(heat.window, heat.box, y) };
    const turn = event.deltaY || event.deltaX;
    if (event.ctrlKey || event.shiftKey) {
      event.preventDefault();
      const by = NEARER ** (-Math.max(-120, Math.min(120, turn)) / 100);
      heat.zoom({ steps: by, ranks: event.shiftKey ? 1 : by }, at);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      heat.moveBy((event.deltaX / heat.box.width) * (heat.window.step1 - heat.window.step0), 0);
    }
  };

  const twice = (event: MouseEvent): void => {
    const { x, y } = place(event);
    if (heat.at(x, y) !== null) heat.zoom({ steps: 0.5, ranks: 0.5 }, { step: stepAtX(heat.window, heat.box, x), rank: rankAtY(heat.window, heat.box, y) });
  };

  const left = (event: PointerEvent): void => {
    if (!fingers.has(event.pointerId)) hooks.pointed(null, 0, 0);
  };

  const stop = new AbortController();
  const { signal } = stop;
  canvas.addEventListener("pointerdown", down, { signal });
  canvas.addEventListener("pointermove", move, { signal });
  canvas.addEventListener("pointerup", up, { signal });
  canvas.addEventListener("pointercancel", up, { signal });
  canvas.addEventListener("pointerleave", left, { signal });
  canvas.addEventListener("wheel", wheel, { signal, passive: false });
  canvas.addEventListener("dblclick", twice, { signal });
  keepPage(canvas, { signal });
  return () => stop.abort();
}

function rectangle(box: Box, from: Point, to: Point): Box {
  const x = Math.min(Math.max(to.x, box.left), box.left + box.width);
  const y = Math.min(Math.max(to.y, box.top), box.top + box.height);
  const flat = Math.abs(y - from.y) < Math.min(FLAT, box.height / 3);
  return {
    left: Math.min(from.x, x),
    width: Math.abs(x - from.x),
    top: flat ? box.top : Math.min(from.y, y),
    height: flat ? box.height : Math.abs(y - from.y),
  };
}
