/** Where the page gets a run from: a hub over HTTP, or the data inside report.html. The page knows only this. */

import type { FilePiece, Heat, StepsDocument, RunEvent, FindingsDocument, Status } from "./documents";

export type Params = Record<string, string | number | undefined>;

/** What a stream tells; see docs/api.md, "Live". */
export type News =
  | { event: "reset"; data: { why: string; attempt: number; last_step: number } }
  | { event: "steps"; data: StepsDocument }
  | { event: "again"; data: StepsDocument }
  | { event: "events"; data: { events: RunEvent[] } }
  | { event: "findings"; data: FindingsDocument }
  | { event: "status"; data: Status }
  | { event: "heartbeat"; data: { wall_ns: number } }
  | { event: "gone"; data: { why: string } }
  | { event: "end"; data: { why: string } };

/**
 * How the connection to the source is. Tried again by itself: `lost`, and `busy`, when too many others follow. Not
 * any more: `over`, the run is, and the hub still answers; `ended`, the hub went with its run; `refused`, the session is
 * over; `gone`, the run was removed; `file`, there never was one.
 */
export type Connection = "connecting" | "live" | "lost" | "busy" | "over" | "ended" | "refused" | "gone" | "file";

export interface Follower {
  news(news: News): void;
  connection(now: Connection): void;
}

export interface Source {
  readonly kind: "hub" | "file";
  /** A JSON document below `/api/v1/`, e.g. `runs/night/steps`. Rejects with a Failure. */
  get<T>(path: string, params?: Params, signal?: AbortSignal): Promise<T>;
  heat(run: string, params: Params, signal?: AbortSignal): Promise<Heat>;
  /** A piece of a file of the run; `params` as docs/api.md has them: offset, tail, most. */
  file(run: string, path: string, params?: Params, signal?: AbortSignal): Promise<FilePiece>;
  /** What is new, until the function that comes back is called. It reconnects by itself and goes on where it was. */
  follow(run: string, follower: Follower): () => void;
  /** Trade the reader's token for a session. False: it is the wrong one. */
  signIn(token: string): Promise<boolean>;
}

/** `foreign`: somebody else answered in the hub's place; `version`: a hub whose answers this page does not know. */
export type Trouble = "refused" | "missing" | "wrong" | "unreachable" | "busy" | "foreign" | "version" | "fault";

/** A question that was not answered, and why in words. */
export class Failure extends Error {
  constructor(
    readonly trouble: Trouble,
    message: string,
  ) {
    super(message);
  }
}

export const aborted = (error: unknown): boolean => error instanceof DOMException && error.name === "AbortError";
