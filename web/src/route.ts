/** Where the page is, as a signal: the address of the browser is read into it and written from it. */

import { signal } from "@preact/signals";
import { readRoute, withoutToken, writeRoute, type Route } from "./address";

export { compareLink, runLink } from "./address";

/** Browsers take only so many changes of the address in a while; a drag over a chart makes hundreds. */
const WRITE_MS = 300;

/** Where the page is now. Change it with `go`. */
export const route = signal<Route>(readRoute(location.hash));
/** A token that came with an address, until somebody takes it. */
export const offered = signal("");
let writing: ReturnType<typeof setTimeout> | null = null;

addEventListener("hashchange", () => {
  if (writing !== null) clearTimeout(writing);
  writing = null;
  offered.value = takeToken() || offered.value;
  route.value = readRoute(location.hash);
});

// Before a link is followed, or the page left, the address says what was looked at: Back then leads there.
for (const event of ["click", "pagehide"]) addEventListener(event, settle, true);

/** Another screen or run is a new entry of the history; another step or rank of the same replaces the last one. */
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

/** To another place without a way back to this one. */
export function instead(place: Pick<Route, "screen" | "runs">): void {
  const next = { ...readRoute(""), ...place, bare: false };
  address("replaceState", writeRoute(next));
  route.value = next;
}

/** Write what is still to be written of the address; it then says all. */
export function settle(): void {
  if (writing === null) return;
  clearTimeout(writing);
  writing = null;
  address("replaceState", writeRoute(route.value));
}

/** Takes a token out of the address (`#token=…`), so that it stays neither there nor in the history. */
export function takeToken(): string {
  const [token, rest] = withoutToken(location.hash);
  if (rest === location.hash) return "";
  address("replaceState", rest);
  route.value = readRoute(rest);
  return token;
}

/** A frame inside another page (a notebook) may not change its address; what is looked at is then only here. */
function address(how: "pushState" | "replaceState", next: string): void {
  try {
    history[how](null, "", next);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
  }
}

function samePlace(one: Route, two: Route): boolean {
  return one.screen === two.screen && JSON.stringify(one.runs) === JSON.stringify(two.runs);
}
