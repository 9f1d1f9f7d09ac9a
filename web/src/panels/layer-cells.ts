/** Modules as nested rectangles: memory by kind as a treemap, forward and backward time as an icicle. */

import type { LayerRow } from "../api/layer-documents";
import type { Cell } from "../charts/cells";
import { squarify, strips, type Box } from "../charts/treemap";
import { passProperty, kindProperty } from "./layer-figures";

/** A module below this size is drawn without what is inside it. */
const LEAST_PX = 5;
export const ROW_PX = 21;
const MOST_LEVELS = 12;

/** By row, the rows directly inside it. */
export function childrenOf(rows: readonly LayerRow[]): number[][] {
  const found: number[][] = rows.map(() => []);
  for (const [at, { parent }] of rows.entries()) found[parent]?.push(at);
  return found;
}

export function titleOf(row: LayerRow | undefined): string {
  return row === undefined ? "" : row.name || row.type;
}

/** Its name inside another module. */
export function nameInside(row: LayerRow, outer: LayerRow | undefined): string {
  const name = titleOf(row);
  return outer !== undefined && outer.name !== "" && name.startsWith(`${outer.name}.`) ? name.slice(outer.name.length + 1) : name;
}

/** A list of numbered modules: their names contain its own. */
function isList(rows: readonly LayerRow[], inside: readonly number[]): boolean {
  return inside.length > 0 && inside.every((at) => /(^|\.)\d+$/.test(rows[at]?.name ?? ""));
}

/** The memory of row `root` and of everything inside it; in the innermost modules one strip for each kind. */
export function memoryCells(rows: readonly LayerRow[], root: number, kinds: readonly string[], box: Box): Cell[] {
  const children = childrenOf(rows);
  const cells: Cell[] = [];
  const fill = (at: number, parent: number, level: number, bytes: Readonly<Record<string, number>>, place: Box): void => {
    const there = kinds.filter((kind) => (bytes[kind] ?? 0) > 0);
    for (const [strip, one] of strips(there.map((kind) => bytes[kind] ?? 0), place).entries()) {
      const kind = there[strip] ?? "";
      cells.push({ parent, box: one, property: kindProperty(kind), name: "", level, at, part: kind });
    }
  };
  const add = (at: number, parent: number, level: number, place: Box, outer: LayerRow | undefined): void => {
    const row = rows[at];
    if (row === undefined || !(row.total_bytes > 0)) return;
    const own = cells.length;
    const inside = children[at] ?? [];
    const listed = isList(rows, inside);
    cells.push({ parent, box: place, property: null, name: level === 0 || listed ? "" : nameInside(row, outer), level, at, part: "" });
    if (inside.length === 0 || Math.min(place.width, place.height) < LEAST_PX) {
      fill(at, own, level + 1, row.bytes, place);
      return;
    }
    // What it holds itself, with the modules that are not listed.
    const held = Object.fromEntries(kinds.map((kind) => [kind, (row.bytes[kind] ?? 0) - inside.reduce((sum, one) => sum + (rows[one]?.bytes[kind] ?? 0), 0)]));
    const places = squarify([...inside.map((one) => rows[one]?.total_bytes ?? 0), Object.values(held).reduce((sum, one) => sum + one, 0)], place);
    for (const [order, one] of inside.entries()) add(one, own, level + 1, places[order] as Box, listed ? outer : row);
    fill(at, own, level + 1, held, places.at(-1) as Box);
  };
  add(root, -1, 0, box, rows[root]);
  return cells;
}

export const PASSES = ["forward", "backward"] as const;
export type Pass = (typeof PASSES)[number];

export function passUs(row: LayerRow | undefined, pass: Pass, own = false): number | null {
  if (row === undefined) return null;
  if (pass === "forward") return own ? row.own_forward_us : row.forward_us;
  return own ? row.own_backward_us : row.backward_us;
}

/**
 * The forward pass and the backward pass of row `root` side by side, each as wide as it takes long, with the modules inside in
 * the rows below. What is not covered below a module is its own time. Times of modules that are called from several places
 * may add up to more than the module around them; they are then drawn narrower.
 */
export function timeCells(rows: readonly LayerRow[], root: number, width: number): Cell[] {
  const children = childrenOf(rows);
  const cells: Cell[] = [];
  const whole = PASSES.reduce((sum, pass) => sum + (passUs(rows[root], pass) ?? 0), 0);
  if (!(whole > 0)) return [];
  const add = (at: number, pass: Pass, parent: number, level: number, x: number, wide: number, outer: LayerRow | undefined): void => {
    const row = rows[at];
    if (row === undefined || !(wide > 0) || level >= MOST_LEVELS) return;
    const own = cells.length;
    const name = level === 0 ? `${pass}: ${titleOf(row)} ${pass === "forward" ? row.text.forward_us : row.text.backward_us}` : nameInside(row, outer);
    cells.push({ parent, box: { x, y: level * ROW_PX, width: wide, height: ROW_PX }, property: passProperty(pass), name, level, at, part: pass });
    const inside = children[at] ?? [];
    const times = inside.map((one) => passUs(rows[one], pass) ?? 0);
    const sum = times.reduce((total, one) => total + one, 0);
    const scale = wide / Math.max(sum, passUs(row, pass) ?? 0, Number.MIN_VALUE);
    let along = x;
    for (const [order, one] of inside.entries()) {
      const length = (times[order] ?? 0) * scale;
      if (length >= 0.5) add(one, pass, own, level + 1, along, length, row);
      along += length;
    }
  };
  let x = 0;
  for (const pass of PASSES) {
    const wide = ((passUs(rows[root], pass) ?? 0) / whole) * width;
    add(root, pass, -1, 0, x, wide, undefined);
    x += wide;
  }
  return cells;
}

/** Rows of the icicle below `root`, at any width. */
export function levelsOf(rows: readonly LayerRow[], root: number): number {
  const children = childrenOf(rows);
  const deep = (at: number, level: number): number =>
    Math.max(level, ...(level + 1 >= MOST_LEVELS ? [] : (children[at] ?? []).filter((one) => PASSES.some((pass) => (passUs(rows[one], pass) ?? 0) > 0)).map((one) => deep(one, level + 1))));
  return deep(root, 0) + 1;
}

/** The rows from the model down to one of them. */
export function pathTo(rows: readonly LayerRow[], at: number): number[] {
  const path: number[] = [];
  for (let up = at; up >= 0; up = rows[up]?.parent ?? -1) path.unshift(up);
  return path;
}
