/**
 * The visible part of the map, and the conversion of screen positions.
 *
 * Step n covers n to n + 1, and so does rank n. A window has fractions while it moves and whole numbers at rest.
 */

import { heldSpan, movedSpan, zoomedSpan, type Span } from "./span";

export interface HeatWindow {
  step0: number;
  step1: number;
  rank0: number;
  rank1: number;
}

/** Position of the map within its canvas, in CSS pixels. */
export interface Box {
  left: number;
  top: number;
  width: number;
  height: number;
}

export const LEAST_STEPS = 4;
export const LEAST_RANKS = 1;

export interface At {
  step: number;
  rank: number;
}

export function stepAtX(window: HeatWindow, box: Box, x: number): number {
  return window.step0 + ((x - box.left) / box.width) * (window.step1 - window.step0);
}

export function rankAtY(window: HeatWindow, box: Box, y: number): number {
  return window.rank0 + ((y - box.top) / box.height) * (window.rank1 - window.rank0);
}

export function xOf(window: HeatWindow, box: Box, step: number): number {
  return box.left + ((step - window.step0) / (window.step1 - window.step0)) * box.width;
}

export function yOf(window: HeatWindow, box: Box, rank: number): number {
  return box.top + ((rank - window.rank0) / (window.rank1 - window.rank0)) * box.height;
}

/** Step and rank at a point; null outside the map. */
export function pointAt(window: HeatWindow, box: Box, x: number, y: number): At | null {
  if (x < box.left || y < box.top || x >= box.left + box.width || y >= box.top + box.height) return null;
  return { step: Math.floor(stepAtX(window, box, x)), rank: Math.floor(rankAtY(window, box, y)) };
}

/** Limit to `all` and to a minimum size. */
export function held(window: HeatWindow, all: HeatWindow): HeatWindow {
  return joined(heldSpan(steps(window), steps(all), LEAST_STEPS), heldSpan(ranks(window), ranks(all), LEAST_RANKS));
}

/** Zoom; `by` below 1 zooms in. The point (`step`, `rank`) stays in place. */
export function zoomed(window: HeatWindow, all: HeatWindow, at: At, by: { steps: number; ranks: number }): HeatWindow {
  return held(joined(zoomedSpan(steps(window), at.step, by.steps), zoomedSpan(ranks(window), at.rank, by.ranks)), all);
}

export function moved(window: HeatWindow, all: HeatWindow, bySteps: number, byRanks: number): HeatWindow {
  return joined(movedSpan(steps(window), steps(all), bySteps), movedSpan(ranks(window), ranks(all), byRanks));
}

function steps({ step0, step1 }: HeatWindow): Span {
  return [step0, step1];
}

function ranks({ rank0, rank1 }: HeatWindow): Span {
  return [rank0, rank1];
}

function joined([step0, step1]: Span, [rank0, rank1]: Span): HeatWindow {
  return { step0, step1, rank0, rank1 };
}

/** Move just enough to include the cell. */
export function showing(window: HeatWindow, all: HeatWindow, at: At): HeatWindow {
  const by = (from: number, to: number, place: number): number => (place < from ? place - from : place + 1 > to ? place + 1 - to : 0);
  return moved(window, all, by(window.step0, window.step1, at.step), by(window.rank0, window.rank1, at.rank));
}

/** Round to whole steps and ranks. */
export function rested(window: HeatWindow, all: HeatWindow): HeatWindow {
  return held(
    {
      step0: Math.round(window.step0),
      step1: Math.max(Math.round(window.step0) + LEAST_STEPS, Math.round(window.step1)),
      rank0: Math.round(window.rank0),
      rank1: Math.max(Math.round(window.rank0) + LEAST_RANKS, Math.round(window.rank1)),
    },
    all,
  );
}

export function same(one: HeatWindow, two: HeatWindow): boolean {
  return one.step0 === two.step0 && one.step1 === two.step1 && one.rank0 === two.rank0 && one.rank1 === two.rank1;
}

/** About `most` round integers for an axis. */
export function ticks(from: number, to: number, most: number): number[] {
  const rough = Math.max(1, (to - from) / Math.max(1, most));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) ?? 10 * power);
  const found: number[] = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
  return found;
}
