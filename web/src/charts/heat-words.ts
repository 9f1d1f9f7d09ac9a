/** Texts of the map: tooltip, accessible description and legend. */

import type { Heat } from "../api/documents";
import { bytes, count, duration } from "../ui/format";
import type { Cell, Piece } from "./heat-piece";

const ON_DEVICE = "device:";
const VALUE_WORDS: Record<string, string> = {
  work: "work without waiting",
  wall: "whole step",
  allocated: "device memory, allocated",
  reserved: "device memory, reserved",
  peak_allocated: "device memory, peak",
};

export function valueWords(value: string): string {
  if (isOnDevice(value)) return `${valueWords(value.slice(ON_DEVICE.length))} (device)`;
  return VALUE_WORDS[value] ?? value;
}

export function isOnDevice(value: string): boolean {
  return value.startsWith(ON_DEVICE);
}

/** Key of the same phase in device time. */
export function onDevice(phase: string): string {
  return `${ON_DEVICE}${phase}`;
}

export function figure(value: number, unit: Heat["unit"]): string {
  return unit === "bytes" ? bytes(value) : duration(value);
}

function span(word: string, first: number, last: number): string {
  return first === last ? `${word} ${count(first)}` : `${word}s ${count(first)}–${count(last)}`;
}

export function placeWords(cell: Cell): string {
  return `${span("rank", cell.firstRank, cell.lastRank)}, ${span("step", cell.firstStep, cell.lastStep)}`;
}

/** `61.2 ms`, or how the value was aggregated for cells of several steps. */
export function cellWords(cell: Cell, piece: Piece): string {
  if (Number.isNaN(cell.value)) return "not known";
  const single = cell.firstRank === cell.lastRank && cell.firstStep === cell.lastStep;
  const text = figure(cell.value, piece.heat.unit);
  if (single) return text;
  if (piece.stat === "mean") return `${text} on average`;
  if (piece.heat.exact) return `at most ${text}`;
  return cell.firstRank === cell.lastRank ? `${text} on average` : `${text}, the highest of the ranks' averages`;
}

/** What one cell represents. */
export function grainWords(piece: Piece): string {
  const steps = piece.stepSpan === 1 ? "one step" : `${count(piece.stepSpan)} steps`;
  const ranks = piece.rankSpan === 1 ? "one rank" : `${count(piece.rankSpan)} ranks`;
  if (piece.stepSpan === 1 && piece.rankSpan === 1) return "each cell is one step of one rank";
  if (piece.stat === "mean") return `each cell is the mean of ${steps} of ${ranks}`;
  if (piece.heat.exact) return `each cell is the highest of ${steps} of ${ranks}`;
  return piece.rankSpan === 1 ? `each cell is the mean of ${steps}` : `each cell is the highest of ${ranks}, each the mean of ${steps}`;
}
