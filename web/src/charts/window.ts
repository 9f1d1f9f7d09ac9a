/** A window of steps: moved, resized, zoomed; always inside the run and at least one step. */

import type { View } from "../run/open-run";

export function moved(view: View, by: number, whole: View): View {
  const length = view.last - view.first;
  const first = Math.max(whole.first, Math.min(view.first + Math.round(by), whole.last - length));
  return { first, last: Math.min(first + length, whole.last) };
}

/** Zoom; `factor` below 1 zooms in. The middle stays in place, or the end if it is the newest step. */
export function zoomed(view: View, factor: number, whole: View): View {
  const all = whole.last - whole.first + 1;
  const before = view.last - view.first + 1;
  let length = Math.round(before * factor);
  if (length === before) length += factor > 1 ? 1 : -1;
  length = Math.min(all, Math.max(1, length));
  const atEnd = view.last >= whole.last;
  const first = atEnd ? whole.last - length + 1 : Math.round((view.first + view.last + 1 - length) / 2);
  return moved({ first, last: first + length - 1 }, 0, whole);
}

/** Move one edge; it may cross the other. */
export function resized(view: View, edge: "first" | "last", to: number, whole: View): View {
  const step = Math.min(Math.max(Math.round(to), whole.first), whole.last);
  const other = edge === "first" ? view.last : view.first;
  return { first: Math.min(step, other), last: Math.max(step, other) };
}

/** The newest steps. */
export function newest(length: number, whole: View): View {
  return { first: Math.max(whole.first, whole.last - length + 1), last: whole.last };
}

/** Null if the view covers everything. */
export function unlessAll(view: View, whole: View): View | null {
  return view.first <= whole.first && view.last >= whole.last ? null : view;
}
