/** Where the points, the names and the line of a front of memory and time are drawn, and where keys lead. */

import type { FrontPoint } from "../api/report-document";
import { bytes, duration, tick } from "../ui/format";

export interface Tick {
  at: number;
  words: string;
}

export interface Spot {
  x: number;
  y: number;
  /** The ends of the interval; `high` is the longer time, which is drawn above. */
  low: number;
  high: number;
  /** Null: there is no room for the name. */
  name: { x: number; y: number; end: boolean } | null;
}

export interface FrontLayout {
  left: number;
  right: number;
  top: number;
  bottom: number;
  across: Tick[];
  up: Tick[];
  spots: Spot[];
  /** The staircase through the points on the front, as the `points` of a polyline. */
  line: string;
}

const MARGIN = { top: 26, right: 18, bottom: 46, left: 70 };
const ROOM = 0.12;
const TICK_PX = { across: 110, up: 56 };
const LETTER_PX = 6.8;
const NAME = { above: 11, below: 3, gap: 9 };
const DOT_PX = 6;
/** Where a name may go, by how far it is below its point; each is tried on the right, then on the left. */
const SHIFTS = [-6, 14, 4, -20, 28, -34, 42];

export function frontLayout(points: readonly FrontPoint[], width: number, height: number): FrontLayout {
  const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, height - MARGIN.bottom];
  const memory = range(points.map((point) => point.memory));
  const time = range(points.flatMap((point) => point.interval_ns));
  const x = (value: number): number => round(left + ((right - left) * (value - memory[0])) / (memory[1] - memory[0]));
  const y = (value: number): number => round(bottom - ((bottom - top) * (value - time[0])) / (time[1] - time[0]));
  const spots = points.map((point): Spot => ({ x: x(point.memory), y: y(point.ns), low: y(point.interval_ns[0]), high: y(point.interval_ns[1]), name: null }));
  placeNames(points, spots, width, height);
  return {
    left,
    right,
    top,
    bottom,
    across: ticks(memory, (right - left) / TICK_PX.across, 2).map((at) => ({ at: x(at), words: tick(at, bytes) })),
    up: ticks(time, (bottom - top) / TICK_PX.up, 10).map((at) => ({ at: y(at), words: tick(at, duration) })),
    spots,
    line: staircase(points, spots),
  };
}

/** With room on both sides, so that neither a point nor its name is at the edge. */
export function range(values: readonly number[]): [number, number] {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max((high - low) * ROOM, high * 0.02);
  return [Math.max(low - room, 0), high + room];
}

/** Round numbers inside a range, about `most` of them: multiples of 1, 2 or 5 powers of ten, or of powers of two. */
export function ticks([low, high]: readonly [number, number], most: number, base: 2 | 10): number[] {
  const least = (high - low) / Math.max(most, 1);
  const power = base ** Math.floor(Math.log(least) / Math.log(base));
  const step = (base === 2 ? [1, 2] : [1, 2, 5, 10]).map((by) => by * power).find((one) => one >= least) ?? least;
  const found: number[] = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) found.push(at * step);
  return found;
}

/** Up to the memory of the next point, the time of the last one is the best there is. */
function staircase(points: readonly FrontPoint[], spots: readonly Spot[]): string {
  const corners: string[] = [];
  let before: Spot | null = null;
  points.forEach((point, at) => {
    const spot = spots[at];
    if (point.place !== "front" || spot === undefined) return;
    if (before !== null) corners.push(`${spot.x},${before.y}`);
    corners.push(`${spot.x},${spot.y}`);
    before = spot;
  });
  return corners.join(" ");
}

interface Box {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

/** Names of points on the front are placed first; none covers another name or a point. */
function placeNames(points: readonly FrontPoint[], spots: readonly Spot[], width: number, height: number): void {
  const taken: Box[] = spots.map(({ x, y }) => ({ left: x - DOT_PX, right: x + DOT_PX, top: y - DOT_PX, bottom: y + DOT_PX }));
  const order = points.map((_, at) => at).sort((one, two) => Number(points[two]?.place === "front") - Number(points[one]?.place === "front"));
  for (const at of order) {
    const [spot, point] = [spots[at], points[at]];
    if (spot === undefined || point === undefined) continue;
    const long = point.name.length * LETTER_PX;
    for (const [shift, end] of SHIFTS.flatMap((by) => [[by, false], [by, true]] as const)) {
      const [x, y] = [spot.x + (end ? -NAME.gap : NAME.gap), spot.y + shift];
      const box = { left: end ? x - long : x, right: end ? x : x + long, top: y - NAME.above, bottom: y + NAME.below };
      if (box.left < 0 || box.right > width || box.top < 0 || box.bottom > height || taken.some((one) => overlap(one, box))) continue;
      spot.name = { x, y, end };
      taken.push(box);
      break;
    }
  }
}

function overlap(one: Box, two: Box): boolean {
  return one.left < two.right && two.left < one.right && one.top < two.bottom && two.top < one.bottom;
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}

/** The point that a key leads to; null: none; undefined: not a key of this chart. */
export function nextPoint(key: string, now: number | null, count: number): number | null | undefined {
  const last = count - 1;
  switch (key) {
    case "ArrowRight":
    case "ArrowUp":
      return now === null ? 0 : Math.min(now + 1, last);
    case "ArrowLeft":
    case "ArrowDown":
      return now === null ? last : Math.max(now - 1, 0);
    case "Home":
      return 0;
    case "End":
      return last;
    case "Escape":
      return now === null ? undefined : null;
    default:
      return undefined;
  }
}
