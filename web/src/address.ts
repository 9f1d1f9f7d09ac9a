/**
 * The route in the address: screen, run, steps and rank, so that a link reproduces the view.
 *
 *     #/?tag=nightly&sort=cost_share           the list of runs, filtered and sorted (`run/list-rows.ts`)
 *     #/run/night?first=100&last=300&step=212&rank=3
 *     #/run/night/incident/2                   an incident of it
 *     #/run/night/capture/step-340?view=kernels&rank=3     a capture of it
 *     #/compare/night/morning                  up to eight; the first is the baseline
 *     #/sweep/fsdp2                            a sweep
 *     #/fleet?days=30                          what all runs lost, to what, and on which host
 *     #/trace/traces?view=kernels&rank=3       a folder of traces
 *
 * The route is in the fragment, which works below any path and in a file. It is untrusted input: invalid parts are
 * ignored, and it is only used as text.
 */

export interface Route {
  screen: "list" | "run" | "incident" | "capture" | "compare" | "sweep" | "trace" | "fleet";
  /** Of the screen of a sweep or of traces: its ID. */
  runs: string[];
  /** The visible steps; null: all, including new ones. */
  first: number | null;
  last: number | null;
  step: number | null;
  rank: number | null;
  /** Of the screen of an incident: its number. */
  incident?: number | null;
  /** Of the screen of a capture: its ID. */
  capture?: string | null;
  /** Of the screens of a capture and of traces; null: the first one. */
  view?: string | null;
  /** The rank that is compared with the other. */
  peer?: number | null;
  /** Of the fleet: how many days back; missing: all. */
  days?: number | null;
  /** The address was empty: the list was not requested explicitly. */
  bare: boolean;
  /** How the list is filtered and sorted; missing: all, newest first. */
  query?: string;
}

/** As many as the hub compares at once. */
export const MOST_COMPARED = 8;

const NUMBERS = ["first", "last", "step", "rank"] as const;
const NOWHERE = { first: null, last: null, step: null, rank: null, bare: false };

export const LIST: Route = { screen: "list", runs: [], ...NOWHERE };

export function readRoute(hash: string): Route {
  const { path, query } = parts(hash);
  const [screen = "", ...words] = path.split("/").filter(Boolean);
  const runs = words.map(decoded);
  const [first = null, last = null, step = null, rank = null] = NUMBERS.map((name) => number(new URLSearchParams(query).get(name)));
  if (screen === "run" && runs.length === 1) return { screen, runs, first, last, step, rank, bare: false };
  if (screen === "run" && runs.length === 3 && runs[1] === "incident") {
    const incident = number(runs[2] ?? null);
    if (incident !== null) return { screen: "incident", runs: runs.slice(0, 1), ...NOWHERE, incident };
  }
  const traced = { view: new URLSearchParams(query).get("view"), peer: number(new URLSearchParams(query).get("peer")) };
  if (screen === "run" && runs.length === 3 && runs[1] === "capture") {
    return { screen: "capture", runs: runs.slice(0, 1), ...NOWHERE, rank, capture: runs[2] ?? "", ...traced };
  }
  if (screen === "trace" && runs.length === 1) return { screen, runs, ...NOWHERE, rank, ...traced };
  if (screen === "sweep" && runs.length === 1) return { screen, runs, ...NOWHERE };
  if (screen === "fleet" && runs.length === 0) return { screen, runs, ...NOWHERE, days: number(new URLSearchParams(query).get("days")) };
  if (screen === "compare" && runs.length >= 2 && runs.length <= MOST_COMPARED) return { screen, runs, ...NOWHERE };
  return { screen: "list", runs: [], ...NOWHERE, bare: path === "", ...(screen === "" && query !== "" ? { query } : {}) };
}

export function writeRoute(route: Route): string {
  if (route.screen === "list") return route.query ? `#/?${route.query}` : "#/";
  if (route.screen === "fleet") return route.days ? `#/fleet?days=${route.days}` : "#/fleet";
  if (route.screen === "incident") return `#/run/${route.runs.map(encoded).join("/")}/incident/${route.incident ?? 0}`;
  const params = new URLSearchParams();
  for (const name of NUMBERS) {
    const value = route[name];
    if (value !== null) params.set(name, String(value));
  }
  if (route.screen === "capture" || route.screen === "trace") {
    if (route.view != null) params.set("view", route.view);
    if (route.peer != null) params.set("peer", String(route.peer));
  }
  const query = params.toString();
  if (route.screen === "capture") return `#/run/${route.runs.map(encoded).join("/")}/capture/${encoded(route.capture ?? "")}${query ? `?${query}` : ""}`;
  return `#/${route.screen}/${route.runs.map(encoded).join("/")}${query ? `?${query}` : ""}`;
}

export function runLink(run: string, at: Partial<Route> = {}): string {
  return writeRoute({ screen: "run", runs: [run], ...NOWHERE, ...at });
}

/**
 * The ID of another run in the folder of the run `id`, whose name is `name`. In a hub of several folders an ID is the name, `~` and the tag of
 * the folder.
 */
export function siblingRun(id: string, name: string, other: string): string {
  return id.startsWith(`${name}~`) ? other + id.slice(name.length) : other;
}

export function incidentLink(run: string, incident: number): string {
  return writeRoute({ screen: "incident", runs: [run], ...NOWHERE, incident });
}

export function captureLink(run: string, capture: string): string {
  return writeRoute({ screen: "capture", runs: [run], ...NOWHERE, capture });
}

export function traceLink(trace: string): string {
  return writeRoute({ screen: "trace", runs: [trace], ...NOWHERE });
}

export function compareLink(runs: readonly string[]): string {
  return writeRoute({ screen: "compare", runs: [...runs], ...NOWHERE });
}

export function sweepLink(sweep: string): string {
  return writeRoute({ screen: "sweep", runs: [sweep], ...NOWHERE });
}

export function fleetLink(days: number | null = null): string {
  return writeRoute({ screen: "fleet", runs: [], ...NOWHERE, days });
}

/** The token in an address (or ""), and the address without it. */
export function withoutToken(hash: string): [string, string] {
  const { path, query } = parts(hash);
  const bare = path.startsWith("token=");
  const pieces = bare ? path.split("&") : query.split("&");
  const found = pieces.find((piece) => piece.startsWith("token="));
  if (found === undefined) return ["", hash];
  const kept = pieces.filter((piece) => !piece.startsWith("token=")).join("&");
  return [decoded(found.slice("token=".length)), bare ? "#" : `#${path}${kept ? `?${kept}` : ""}`];
}

/** A name as part of an address; lone surrogates, which cannot be encoded, are replaced. */
export function encoded(name: string): string {
  return encodeURIComponent(name.replace(/\p{Surrogate}/gu, "\uFFFD"));
}

function parts(hash: string): { path: string; query: string } {
  const text = hash.replace(/^#/, "");
  const at = text.indexOf("?");
  return at < 0 ? { path: text, query: "" } : { path: text.slice(0, at), query: text.slice(at + 1) };
}

function number(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
