/**
 * Pointers (fingers or the mouse) on a map or chart: their positions, and the pinch gesture of two.
 *
 * Moving one finger while another is down zooms and pans.
 */

export interface Point {
  x: number;
  y: number;
}

/** Content at `from` moves to `to`, and the visible range is multiplied by `by`; below 1 zooms in. */
export interface Pinch {
  from: Point;
  to: Point;
  by: number;
}

export interface Moved {
  before: Point;
  /** Null unless exactly two fingers are down. */
  pinch: Pinch | null;
}

/** Minimum distance; with closer fingers the zoom would jump. */
const LEAST_PX = 20;

export class Fingers {
  private readonly down = new Map<number, Point>();

  get count(): number {
    return this.down.size;
  }

  has(id: number): boolean {
    return this.down.has(id);
  }

  put(id: number, at: Point): void {
    this.down.set(id, at);
  }

  lift(id: number): boolean {
    return this.down.delete(id);
  }

  /** Null if that pointer is not down. */
  move(id: number, at: Point): Moved | null {
    const before = this.down.get(id);
    if (before === undefined) return null;
    this.down.set(id, at);
    const other = [...this.down].find(([finger]) => finger !== id)?.[1];
    return { before, pinch: other === undefined || this.down.size > 2 ? null : pinch(before, at, other) };
  }
}

/** Prevent two fingers on the element from scrolling the page. */
export function keepPage(element: HTMLElement, options: AddEventListenerOptions = {}): void {
  const touched = (event: TouchEvent): void => {
    // A browser that is already scrolling refuses and logs a warning.
    if (event.touches.length > 1 && event.cancelable) event.preventDefault();
  };
  element.addEventListener("touchmove", touched, { ...options, passive: false });
}

export function pointOn(element: HTMLElement, event: MouseEvent): Point {
  const edge = element.getBoundingClientRect();
  return { x: event.clientX - edge.left, y: event.clientY - edge.top };
}

function pinch(before: Point, now: Point, other: Point): Pinch {
  const apart = (one: Point): number => Math.max(LEAST_PX, Math.hypot(one.x - other.x, one.y - other.y));
  const middle = (one: Point): Point => ({ x: (one.x + other.x) / 2, y: (one.y + other.y) / 2 });
  return { from: middle(before), to: middle(now), by: apart(before) / apart(now) };
}
