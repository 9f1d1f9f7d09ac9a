/** Nested rectangles with names, as in a treemap or an icicle: which one is at a point, which is next, which names fit. */

import type { Box } from "./treemap";

/** Parents come before their children, which lie inside or below them. */
export interface Cell {
  /** Index of the cell that contains it; -1: none. */
  parent: number;
  box: Box;
  /** The custom property with its color; null: only an outline, drawn over what is inside. */
  property: string | null;
  /** Short, for a label in the picture; empty: none. */
  name: string;
  /** How deep it is. */
  level: number;
  /** The row of the document that it shows, and the part of it, such as a kind of memory. */
  at: number;
  part: string;
}

export interface Label {
  cell: number;
  x: number;
  y: number;
  text: string;
}

export const FONT_PX = 11;
const LINE_PX = 14;
const LETTER_PX = 6.3;
const PAD_PX = 4;
/** A shorter beginning of a name says nothing. */
const LEAST_LETTERS = 5;
/** Lines below the top of a cell that are tried, where names of outer cells are in the way. */
const MOST_LINES = 4;

/** The innermost cell at a point; -1: none. */
export function cellAt(cells: readonly Cell[], x: number, y: number): number {
  return cells.findLastIndex(({ box }) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height);
}

/** The cell to which an arrow key moves: siblings, the largest one inside, the one that contains it. */
export function neighbor(cells: readonly Cell[], from: number, key: string): number {
  const cell = cells[from];
  if (cell === undefined) return cells.length > 0 ? 0 : -1;
  const inside = (parent: number): number[] => cells.flatMap((one, at) => (one.parent === parent ? [at] : []));
  switch (key) {
    case "ArrowUp":
      return cell.parent >= 0 ? cell.parent : from;
    case "ArrowDown":
      return inside(from).reduce((best, at) => (best === from || area(cells[at]) > area(cells[best]) ? at : best), from);
    case "ArrowRight":
    case "ArrowLeft": {
      const siblings = inside(cell.parent);
      const place = siblings.indexOf(from) + (key === "ArrowRight" ? 1 : -1);
      return siblings[Math.min(Math.max(0, place), siblings.length - 1)] ?? from;
    }
  }
  return from;
}

function area(cell: Cell | undefined): number {
  return cell === undefined ? 0 : cell.box.width * cell.box.height;
}

/** Names that fit into their cells and do not cover others; those of outer cells come first. */
export function labelsOf(cells: readonly Cell[]): Label[] {
  const order = cells.map((_, at) => at).sort((one, two) => (cells[one]?.level ?? 0) - (cells[two]?.level ?? 0) || one - two);
  const taken: Box[] = [];
  const found: Label[] = [];
  for (const at of order) {
    const cell = cells[at];
    if (cell === undefined || cell.name === "" || cell.box.height < LINE_PX) continue;
    const room = Math.floor((cell.box.width - 2 * PAD_PX) / LETTER_PX);
    const text = cell.name.length <= room ? cell.name : room > LEAST_LETTERS ? `${cell.name.slice(0, room - 1)}…` : "";
    if (text === "") continue;
    const lines = Math.min(MOST_LINES, Math.floor(cell.box.height / LINE_PX));
    for (let line = 0; line < lines; line += 1) {
      const box = { x: cell.box.x + PAD_PX, y: cell.box.y + line * LINE_PX + 1, width: text.length * LETTER_PX, height: LINE_PX - 1 };
      if (taken.some((other) => overlap(other, box))) continue;
      taken.push(box);
      found.push({ cell: at, x: box.x, y: box.y + FONT_PX, text });
      break;
    }
  }
  return found;
}

function overlap(one: Box, two: Box): boolean {
  return one.x < two.x + two.width && two.x < one.x + one.width && one.y < two.y + two.height && two.y < one.y + one.height;
}
