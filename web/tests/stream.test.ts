import { afterEach, expect, test, vi } from "vitest";
import type { Connection, News } from "../src/api/source";
import { follow, Messages, type Open } from "../src/api/stream";

test("messages are assembled however the stream is split", () => {
  const text = 'retry: 2000\n\nevent: reset\nid: 0.5.1.0\ndata: {"why":"first"}\n\nevent: heartbeat\ndata: {"a": "b: c"}\n\n';
  for (let size = 1; size < text.length; size += 1) {
    const received: string[][] = [];
    const messages = new Messages((id, event, data) => received.push([id, event, data]));
    for (let at = 0; at < text.length; at += size) messages.take(text.slice(at, at + size));
    expect(received).toEqual([
      ["0.5.1.0", "reset", '{"why":"first"}'],
      ["", "heartbeat", '{"a": "b: c"}'],
    ]);
  }
});

const JSON_TYPE = { "Content-Type": "application/json" };
const EVENTS = { "Content-Type": "text/event-stream" };

/** What a follower receives for these responses in sequence, the delays between them, and the requests. */
async function heard(answers: (() => Response)[]): Promise<{ said: (Connection | string)[]; waits: number[]; asked: (string | undefined)[] }> {
  const said: (Connection | string)[] = [];
  const asked: (string | undefined)[] = [];
  const waits: number[] = [];
  vi.stubGlobal("addEventListener", () => undefined);
  vi.stubGlobal("removeEventListener", () => undefined);
  const real = setTimeout;
  await new Promise<void>((resolve) => {
    vi.stubGlobal("setTimeout", (act: () => void, ms: number) => {
      if (ms !== 15_000) waits.push(ms);
      return ms === 15_000 ? real(() => undefined, 0) : real(act, 0);
    });
    const open: Open = (headers) => {
      asked.push(headers["Last-Event-ID"]);
      const answer = answers.shift();
      if (answer === undefined) {
        stop();
        real(resolve, 1);
        return Promise.reject(new Error("that was all"));
      }
      return Promise.resolve(answer());
    };
    const final: Connection[] = ["refused", "gone", "ended"];
    const stop = follow(open, {
      news: (news: News) => said.push(`news ${news.event}`),
      connection: (now) => {
        said.push(now);
        if (final.includes(now)) real(resolve, 1);
      },
    });
  });
  return { said, waits, asked };
}

afterEach(() => vi.unstubAllGlobals());

const events = (text: string): Response => new Response(text, { headers: EVENTS });

test("a broken connection resumes where it was, with increasing delays", async () => {
  const broken = (): Response => new Response("<html>proxy</html>", { status: 502 });
  const { said, waits, asked } = await heard([() => events('event: steps\nid: 0.7.0.0\ndata: {}\n\n'), broken, broken, () => events('event: gone\ndata: {"why": ""}\n\n')]);
  expect(said).toEqual(["live", "news steps", "lost", "lost", "lost", "live", "news gone", "gone"]);
  expect(asked).toEqual([undefined, "0.7.0.0", "0.7.0.0", "0.7.0.0"]);
  expect(waits).toEqual([500, 1000, 2000]);
});

test("a hub that shut down with its run is not contacted again", async () => {
  const { said } = await heard([() => events('event: status\nid: 1\ndata: {"over": true}\n\nevent: end\ndata: {"why": ""}\n\n')]);
  expect(said).toEqual(["live", "news status", "news end", "ended"]);
});

test("a refusal is reported at once; a proxy's pages are never taken for the hub's response", async () => {
  expect((await heard([() => new Response("{}", { status: 401, headers: JSON_TYPE })])).said).toEqual(["refused"]);
  expect((await heard([() => new Response("{}", { status: 404, headers: JSON_TYPE })])).said).toEqual(["gone"]);
  const pages = [401, 404, 200].map((status) => () => new Response("<html>sign in</html>", { status, headers: { "Content-Type": "text/html" } }));
  expect((await heard(pages)).said).toEqual(["lost", "lost", "lost"]);
});

test("a full hub is not contacted for as long as it asks", async () => {
  const full = (wait: string) => (): Response => new Response("{}", { status: 503, headers: { ...JSON_TYPE, "Retry-After": wait } });
  const { said, waits } = await heard([full("10"), full("99999999"), full("soon")]);
  expect(said).toEqual(["busy", "busy", "busy"]);
  expect(waits).toEqual([10_000, 60_000, 2000]);
});

test("a message that is not JSON ends the connection, not the page", async () => {
  expect((await heard([() => events("event: steps\ndata: {\n\n")])).said).toEqual(["live", "lost"]);
});
