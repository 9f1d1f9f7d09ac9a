/**
 * Fingers (and the mouse, which is one) on a map or a chart: where each of them is, and what two of them ask for.
 *
 * One that moves while the other is down brings things nearer or further away, and moves them along with it.
 */

export interface Point {
  x: number;
  y: number;
}

/** What was at `from` goes to `to`, and `by` times as much is seen: below 1 comes nearer. */
export interface Pinch {
  from: Point;
  to: Point;
  by: number;
}

export interface Moved {
  before: Point;
  /** Null while there is one finger, or more than two. */
  pinch: Pinch | null;
}

/** Fingers closer than this would have things jump. */
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

  /** Null when that one is not down. */
  move(id: number, at: Point): Moved | null {
    const before = this.down.get(id);
    if (before === undefined) return null;
    this.down.set(id, at);
    const other = [...this.down].find(([finger]) => finger !== id)?.[1];
    return { before, pinch: other === undefined || this.down.size > 2 ? null : pinch(before, at, other) };
  }
}

/** Two fingers there do not scroll the page. */
export function keepPage(element: HTMLElement, options: AddEventListenerOptions = {}): void {
  const touched = (event: TouchEvent): void => {
    // A browser that is scrolling already refuses to stop, and says so on the console.
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
