import { afterEach, expect, test, vi } from "vitest";
import { HubSource } from "../src/api/hub-source";
import { Failure, type Trouble } from "../src/api/source";
import { firstQuestions, OpenRun } from "../src/run/open-run";

const source = (): HubSource => new HubSource("http://127.0.0.1/below/");
const asked: string[] = [];

function answer(body: string, init: ResponseInit = {}): void {
  asked.length = 0;
  vi.stubGlobal("fetch", (address: string) => {
    asked.push(address);
    return Promise.resolve(new Response(body, init));
  });
}

afterEach(() => vi.unstubAllGlobals());

async function trouble(question: Promise<unknown>): Promise<[Trouble, string]> {
  try {
    await question;
  } catch (error) {
    if (error instanceof Failure) return [error.trouble, error.message];
    throw error;
  }
  throw new Error("it was answered");
}

test("only valid hub responses are accepted", async () => {
  answer('{"schema": 1, "a": 2}');
  expect(await source().get("runs", { first: 3, none: undefined })).toEqual({ schema: 1, a: 2 });
  expect(asked).toEqual(["http://127.0.0.1/below/api/v1/runs?first=3"]);
  answer('{"schema": 2}');
  expect(await trouble(source().get("runs"))).toEqual(["version", "The hub uses API version 2, this page version 1."]);
  for (const body of ["<!doctype html><title>Sign in</title>", "", "[]", "null", '"text"', '{"a": 1}', "{"]) {
    answer(body, { headers: { "Content-Type": "text/html; charset=utf-8" } });
    expect(await trouble(source().get("runs"))).toEqual(["foreign", "The response (200, text/html) is not from a Stepscope hub."]);
  }
});

test("an early request is made once and used once", async () => {
  answer('{"schema": 1, "a": 2}');
  const hub = source();
  hub.expect("runs/night", { bins: 3 });
  hub.expect("runs/..");
  expect(asked).toEqual(["http://127.0.0.1/below/api/v1/runs/night?bins=3"]);
  expect(await hub.get("runs/night", { bins: 3 })).toEqual({ schema: 1, a: 2 });
  expect(asked.length).toBe(1);
  await hub.get("runs/night", { bins: 3 });
  expect(asked.length).toBe(2);
  answer('{"schema": 1, "error": "why"}', { status: 404 });
  hub.expect("runs/gone");
  expect(await trouble(hub.get("runs/gone"))).toEqual(["missing", "why"]);
  vi.stubGlobal("fetch", () => Promise.reject(new TypeError("Failed to fetch")));
  hub.expect("runs/night");
  expect((await trouble(hub.get("runs/night")))[0]).toBe("unreachable");
});

test("requests refused before a sign-in are repeated", async () => {
  answer('{"schema": 1, "error": "no"}', { status: 401 });
  const hub = source();
  for (const path of ["runs/a", "runs/b", "runs/c"]) hub.expect(path);
  expect(await trouble(hub.get("runs/a"))).toEqual(["refused", "no"]);
  answer('{"schema": 1, "a": 2}');
  expect(await hub.get("runs/b")).toEqual({ schema: 1, a: 2 });
  answer('{"schema": 1, "error": "no"}', { status: 401 });
  hub.expect("runs/c");
  answer('{"schema": 1, "a": 3}');
  await hub.signIn("right");
  expect(await hub.get("runs/c")).toEqual({ schema: 1, a: 3 });
});

test("the first requests are those of an open run", async () => {
  const [hub, paths] = [source(), [] as string[]];
  answer('{"schema": 1, "first": [], "last": [], "findings": [], "events": [], "over": true}');
  for (const [path, params] of firstQuestions("a b/\ud800")) hub.expect(path, params);
  paths.push(...asked);
  const run = new OpenRun(hub, "a b/\ud800");
  await run.open();
  run.close();
  expect(paths.length).toBe(4);
  expect(asked.filter((address) => paths.includes(address))).toEqual(paths);
});

test("each refusal has its own kind", async () => {
  const said: [number, Trouble][] = [[400, "wrong"], [401, "refused"], [404, "missing"], [429, "busy"], [500, "fault"], [503, "busy"]];
  for (const [status, expected] of said) {
    answer('{"schema": 1, "error": "why"}', { status });
    expect(await trouble(source().get("runs"))).toEqual([expected, "why"]);
  }
  answer("<html>Bad gateway</html>", { status: 502, headers: { "Content-Type": "text/html" } });
  expect(await trouble(source().get("runs"))).toEqual(["foreign", "The response (502, text/html) is not from a Stepscope hub."]);
  vi.stubGlobal("fetch", () => Promise.reject(new TypeError("Failed to fetch")));
  expect((await trouble(source().get("runs")))[0]).toBe("unreachable");
});

test("a wrong token returns false, any other failure throws", async () => {
  answer('{"schema": 1, "seconds": 1}');
  expect(await source().signIn("right")).toBe(true);
  answer('{"schema": 1, "error": "no"}', { status: 401 });
  expect(await source().signIn("wrong")).toBe(false);
  answer('{"schema": 1, "error": "too many wrong tokens"}', { status: 429 });
  expect(await trouble(source().signIn("any"))).toEqual(["busy", "too many wrong tokens"]);
});

test("no name escapes the path", async () => {
  answer("{}");
  for (const name of [".", ".."]) {
    expect((await trouble(source().get(`runs/${name}/steps`)))[0]).toBe("missing");
    expect((await trouble(source().file("run", `logs/${name}/x`)))[0]).toBe("missing");
    expect((await trouble(source().heat(name, {})))[0]).toBe("missing");
  }
  expect(asked).toEqual([]);
});

test("the token is sent only if the cookie is not kept", async () => {
  for (const kept of [true, false]) {
    const sent: (string | null)[] = [];
    vi.stubGlobal("fetch", (_address: string, how: RequestInit) => {
      const given = new Headers(how.headers).get("Authorization");
      if (how.method !== "POST") sent.push(given);
      const admitted = kept || given !== null || how.method === "POST";
      return Promise.resolve(new Response(admitted ? '{"schema": 1}' : '{"schema": 1, "error": "no"}', { status: admitted ? 200 : 401 }));
    });
    const hub = source();
    await hub.signIn("secret");
    await hub.get("runs");
    await hub.get("runs");
    expect(sent).toEqual(kept ? [null, null] : [null, "Bearer secret", "Bearer secret"]);
  }
});
