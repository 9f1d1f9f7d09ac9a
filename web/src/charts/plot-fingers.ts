/**
 * Touch gestures on a chart: two fingers zoom and move, one moves sideways, as on the map. Vertical movement of one finger
 * scrolls the page, and a tap is a click.
 *
 * The view moves at once; the change is reported when the last finger is lifted, so that other charts, the address and the
 * hub need not follow each pixel.
 */

import { Fingers, keepPage, pointOn, type Moved } from "./fingers";
import { heldSpan, movedSpan, zoomedSpan, type Span } from "./span";

/** Visible x range, full range, and minimum size. */
export interface Movable {
  span: Span;
  all: Span;
  smallest: number;
}

export interface FingerHooks {
  /** Null: not movable. */
  movable: () => Movable | null;
  show: (span: Span) => void;
  rested: (span: Span) => void;
}

/** Smaller movements of one finger are ignored. */
const DRAG = 5;

/** The visible range after a movement on a plotting area `width` pixels wide. */
export function fingered({ span, all, smallest }: Movable, width: number, { before, pinch }: Moved, now: number): Span {
  const length = (span[1] - span[0]) / width;
  if (pinch === null) return movedSpan(span, all, (before.x - now) * length);
  const slid = movedSpan(span, all, (pinch.from.x - pinch.to.x) * length);
  return heldSpan(zoomedSpan(slid, slid[0] + pinch.to.x * length, pinch.by), all, smallest);
}

/** Attach for the lifetime of the element. */
export function attachFingers(over: HTMLElement, hooks: FingerHooks): void {
  const fingers = new Fingers();
  let start = 0;
  let span: Span | null = null;

  const down = (event: PointerEvent): void => {
    if (event.pointerType !== "touch") return;
    const at = pointOn(over, event);
    fingers.put(event.pointerId, at);
    if (fingers.count === 1) start = at.x;
  };

  const move = (event: PointerEvent): void => {
    const at = pointOn(over, event);
    const moved = fingers.move(event.pointerId, at);
    const movable = moved === null ? null : hooks.movable();
    if (moved === null || movable === null) return;
    if (span === null && moved.pinch === null && Math.abs(at.x - start) < DRAG) return;
    span = fingered({ ...movable, span: span ?? movable.span }, Math.max(1, over.clientWidth), moved, at.x);
    hooks.show(span);
  };

  const up = (event: PointerEvent): void => {
    if (!fingers.lift(event.pointerId) || fingers.count > 0 || span === null) return;
    hooks.rested(span);
    span = null;
  };

  over.addEventListener("pointerdown", down);
  over.addEventListener("pointermove", move);
  over.addEventListener("pointerup", up);
  over.addEventListener("pointercancel", up);
  keepPage(over);
}
