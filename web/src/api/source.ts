/** The interface to a run's data: a hub over HTTP, or the data inside report.html. */

import type { FilePiece, Heat, StepsDocument, RunEvent, FindingsDocument, Status } from "./documents";

export type Params = Record<string, string | number | undefined>;

/** Messages of a stream; see docs/api.md, "Live". */
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
 * State of the connection. Retried automatically: `lost`; `busy` (too many viewers). Final: `over` (the run ended, the hub
 * still responds); `ended` (the hub shut down with its run); `refused` (the session expired); `gone` (the run was
 * removed); `file` (there is no connection).
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
  /** A piece of a file of the run; `params` as in docs/api.md: offset, tail, most. */
  file(run: string, path: string, params?: Params, signal?: AbortSignal): Promise<FilePiece>;
  /** Change something below `/api/v1/`. Rejects with a Failure, whose message says why it was refused. */
  change<T>(method: "POST" | "DELETE", path: string, body?: unknown): Promise<T>;
  /** The run as report.html. Only a hub can make it. */
  report?(run: string): Promise<Blob>;
  /** Any other file below `/api/v1/`. */
  blob?(path: string): Promise<Blob>;
  /** Receive news until the returned function is called. Reconnects automatically and resumes where it was. */
  follow(run: string, follower: Follower): () => void;
  /** Exchange a token for a session. False: wrong token. */
  signIn(token: string): Promise<boolean>;
}

/** `foreign`: the response is not from a hub; `version`: the hub's API version is not supported. */
export type Trouble = "refused" | "missing" | "wrong" | "unreachable" | "busy" | "foreign" | "version" | "fault";

/** A failed request, with the reason as text. */
export class Failure extends Error {
  constructor(
    readonly trouble: Trouble,
    message: string,
  ) {
    super(message);
  }
}

export const aborted = (error: unknown): boolean => error instanceof DOMException && error.name === "AbortError";
