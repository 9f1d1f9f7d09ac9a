/** The current route as a signal, synchronized with the browser's address in both directions. */

import { signal } from "@preact/signals";
import { readRoute, withoutToken, writeRoute, type Route } from "./address";

export { captureLink, compareLink, fleetLink, incidentLink, runLink, sweepLink, traceLink } from "./address";

/** Browsers limit how often the address may change; a drag over a chart makes hundreds of changes. */
const WRITE_MS = 300;

/** The current route. Change it with `go`. */
export const route = signal<Route>(readRoute(location.hash));
/** A token found in the address, until it is used. */
export const offered = signal("");
let writing: ReturnType<typeof setTimeout> | null = null;

addEventListener("hashchange", () => {
  if (writing !== null) clearTimeout(writing);
  writing = null;
  offered.value = takeToken() || offered.value;
  route.value = readRoute(location.hash);
});

// Write the address before a link is followed or the page is left, so that Back returns to this view.
for (const event of ["click", "pagehide"]) addEventListener(event, settle, true);

/** Another screen or run adds a history entry; another step or rank of the same run replaces the last one. */
export function go(change: Partial<Route>): void {
  const before = route.value;
  const next = { ...before, ...change };
  if (samePlace(before, next)) {
    route.value = next;
    writing ??= setTimeout(settle, WRITE_MS);
    return;
  }
  settle();
  address("pushState", writeRoute(next));
  route.value = next;
}

/** Go to another place and replace the current history entry. */
export function instead(place: Pick<Route, "screen" | "runs">): void {
  const next = { ...readRoute(""), ...place, bare: false };
  address("replaceState", writeRoute(next));
  route.value = next;
}

/** Write a pending change of the address now. */
export function settle(): void {
  if (writing === null) return;
  clearTimeout(writing);
  writing = null;
  address("replaceState", writeRoute(route.value));
}

/** Take a token out of the address (`#token=…`), so that it stays neither there nor in the history. */
export function takeToken(): string {
  const [token, rest] = withoutToken(location.hash);
  if (rest === location.hash) return "";
  address("replaceState", rest);
  route.value = readRoute(rest);
  return token;
}

/** A frame inside another page (a notebook) may not change its address; the route then exists only in `route`. */
function address(how: "pushState" | "replaceState", next: string): void {
  try {
    history[how](null, "", next);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
  }
}

function samePlace(one: Route, two: Route): boolean {
  return one.screen === two.screen && one.incident === two.incident && one.capture === two.capture && JSON.stringify(one.runs) === JSON.stringify(two.runs);
}
