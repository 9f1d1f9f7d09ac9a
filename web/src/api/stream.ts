/**
 * Server-sent events over fetch: EventSource can neither send a token nor report why it was refused.
 *
 * Reconnects with `Last-Event-ID` and increasing delays (shorter when the page becomes visible again), and stops only in a
 * final state.
 */

import type { Connection, Follower, News } from "./source";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
/** The hub sends something every five seconds; a connection silent for this long is dead. */
const SILENCE_MS = 15_000;
/** Limit for the delay that a full hub asks for. */
const LONGEST_ASKED_MS = 60_000;
const FINAL: readonly Connection[] = ["refused", "gone", "ended"];

export type Open = (headers: Record<string, string>, signal: AbortSignal) => Promise<Response>;

interface Outcome {
  connection: Connection;
  /** Delay requested by the hub. */
  askedMs?: number;
}

export function follow(open: Open, follower: Follower): () => void {
  const stop = new AbortController();
  void keepFollowing(open, follower, stop.signal);
  return () => stop.abort();
}

async function keepFollowing(open: Open, follower: Follower, stop: AbortSignal): Promise<void> {
  let lastId = "";
  let wait = FIRST_WAIT_MS;
  const wrapped: Follower = {
    news: (news) => {
      wait = FIRST_WAIT_MS;
      if (!stop.aborted) follower.news(news);
    },
    connection: (now) => follower.connection(now),
  };
  const seen = (id: string): void => {
    lastId = id;
  };
  while (!stop.aborted) {
    const { connection, askedMs } = await once(open, lastId, seen, wrapped, stop);
    if (stop.aborted) return;
    follower.connection(connection);
    if (FINAL.includes(connection)) return;
    await pause(askedMs ?? wait, stop);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

async function once(open: Open, lastId: string, seen: (id: string) => void, follower: Follower, stop: AbortSignal): Promise<Outcome> {
  const ours = new AbortController();
  const end = (): void => ours.abort();
  stop.addEventListener("abort", end);
  let silence = setTimeout(end, SILENCE_MS);
  try {
    const response = await open(lastId ? { "Last-Event-ID": lastId } : {}, ours.signal);
    const refusal = refused(response);
    if (refusal !== null || response.body === null) return refusal ?? { connection: "lost" };
    follower.connection("live");
    let last: Connection = "lost";
    const messages = new Messages((id, event, data) => {
      if (id) seen(id);
      if (event === "gone") last = "gone";
      if (event === "end") last = "ended";
      follower.news({ event, data: JSON.parse(data) } as News);
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return { connection: last };
      clearTimeout(silence);
      silence = setTimeout(end, SILENCE_MS);
      messages.take(value);
    }
  } catch {
    return { connection: "lost" };
  } finally {
    clearTimeout(silence);
    stop.removeEventListener("abort", end);
    ours.abort();
  }
}

/** Why there is no stream; null: there is one. Error pages of a proxy only mean "not now". */
function refused(response: Response): Outcome | null {
  const type = response.headers.get("Content-Type") ?? "";
  if (response.ok) return type.startsWith("text/event-stream") ? null : { connection: "lost" };
  if (!type.startsWith("application/json")) return { connection: "lost" };
  if (response.status === 401) return { connection: "refused" };
  if (response.status === 404) return { connection: "gone" };
  if (response.status !== 503 && response.status !== 429) return { connection: "lost" };
  const seconds = Number(response.headers.get("Retry-After") ?? Number.NaN);
  return seconds > 0 ? { connection: "busy", askedMs: Math.min(1000 * seconds, LONGEST_ASKED_MS) } : { connection: "busy" };
}

/** Assembles the chunks of a stream into messages. */
export class Messages {
  private rest = "";

  constructor(private readonly onMessage: (id: string, event: string, data: string) => void) {}

  take(piece: string): void {
    const blocks = (this.rest + piece).split("\n\n");
    this.rest = blocks.pop() ?? "";
    for (const block of blocks) {
      let id = "";
      let event = "";
      let data = "";
      for (const line of block.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon < 0) continue;
        const value = line.slice(colon + 2);
        switch (line.slice(0, colon)) {
          case "id":
            id = value;
            break;
          case "event":
            event = value;
            break;
          case "data":
            data = value;
            break;
        }
      }
      if (event) this.onMessage(id, event, data);
    }
  }
}

/** Wait; ends early when the network returns or the page becomes visible. */
function pause(ms: number, stop: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = (): void => {
      clearTimeout(timer);
      stop.removeEventListener("abort", done);
      removeEventListener("online", done);
      removeEventListener("visibilitychange", looked, true);
      resolve();
    };
    const looked = (): void => {
      if (document.visibilityState === "visible") done();
    };
    const timer = setTimeout(done, ms);
    stop.addEventListener("abort", done);
    addEventListener("online", done);
    addEventListener("visibilitychange", looked, true);
  });
}
