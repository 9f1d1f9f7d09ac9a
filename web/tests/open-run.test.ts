import { afterEach, expect, test, vi } from "vitest";
import type { RunDocument, StepsDocument } from "../src/api/documents";
import { Failure, type Follower, type News, type Source, type Trouble } from "../src/api/source";
import { OpenRun } from "../src/run/open-run";

function steps(first: number, last: number): StepsDocument {
  const numbers = Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => first + at);
  const of = <T>(value: T): T[] => numbers.map(() => value);
  return { first: numbers, last: numbers, steps: of(1), ranks: of(1), quantiles: [0.5], ns: { wall: of([1]) }, mean_ns: { wall: of(1) }, worst: of([]), start_wall_ns: of(0), device_mean_ns: {}, memory_bytes: {} };
}

/** A scripted hub. */
class Hub {
  last = 4;
  over = false;
  asked = 0;
  trouble: Trouble | null = null;
  follower: Follower | null = null;
  following = 0;
  held: (() => void)[] | null = null;

  readonly source: Source = {
    kind: "hub",
    get: async <T>(path: string): Promise<T> => {
      this.asked += 1;
      const said = path.endsWith("/steps") ? steps(0, this.last) : path.endsWith("/findings") ? { verdict: null, findings: [], live: true } : path.endsWith("/events") ? { events: [] } : this.about();
      if (this.held !== null) await new Promise<void>((resolve) => this.held?.push(resolve));
      if (this.trouble !== null) throw new Failure(this.trouble, "no");
      return said as T;
    },
    heat: () => Promise.reject(new Failure("missing", "none")),
    file: () => Promise.reject(new Failure("missing", "none")),
    follow: (_run, follower) => {
      this.follower = follower;
      this.following += 1;
      follower.connection("live");
      return () => {
        this.following -= 1;
      };
    },
    change: () => Promise.reject(new Failure("wrong", "no")),
    signIn: () => Promise.resolve(true),
  };

  about(): Partial<RunDocument> {
    return { status: this.over ? "finished" : "running", over: this.over, world_size: 1, ranks: 1, newest_step: this.last };
  }

  say(event: News["event"], data: unknown): void {
    this.follower?.news({ event, data } as News);
  }
}

async function opened(hub = new Hub()): Promise<[Hub, OpenRun]> {
  const run = new OpenRun(hub.source, "night");
  await run.open();
  return [hub, run];
}

const settled = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 5));
const known = (run: OpenRun): number[] => run.steps.value?.first ?? [];

afterEach(() => vi.useRealTimers());

test("steps between the load and the stream are not lost", async () => {
  const [hub, run] = await opened();
  hub.last = 7;
  hub.say("reset", { why: "first", attempt: 0, last_step: 7 });
  await settled();
  expect(known(run)).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  const asked = hub.asked;
  hub.say("reset", { why: "first", attempt: 0, last_step: 7 });
  await settled();
  expect(hub.asked).toBe(asked);
});

test("news during a reload is kept", async () => {
  const [hub, run] = await opened();
  hub.held = [];
  hub.say("reset", { why: "behind", attempt: 0, last_step: 4 });
  hub.say("steps", steps(5, 6));
  hub.say("steps", steps(7, 7));
  const held = hub.held;
  hub.held = null;
  for (const go of held) go();
  await settled();
  expect(known(run)).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
});

test("a new attempt during a load triggers another load", async () => {
  const [hub, run] = await opened();
  hub.held = [];
  hub.say("reset", { why: "behind", attempt: 0, last_step: 4 });
  hub.say("steps", steps(5, 6));
  hub.say("reset", { why: "attempt", attempt: 1, last_step: 1 });
  hub.last = 1;
  const held = hub.held;
  hub.held = null;
  for (const go of held) go();
  await settled();
  expect(known(run)).toEqual([0, 1]);
});

test("an ended run is not followed; following stops after the last message", async () => {
  const past = new Hub();
  past.over = true;
  const [, one] = await opened(past);
  expect([one.connection.value, past.following]).toEqual(["over", 0]);

  past.about = () => ({ over: true, leaving: true, status: "finished" });
  const [, late] = await opened(past);
  expect([late.connection.value, past.following]).toEqual(["ended", 0]);

  const [hub, run] = await opened();
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout"] });
  hub.over = true;
  hub.say("status", hub.about());
  expect([run.status.value?.status, run.connection.value, hub.following]).toEqual(["finished", "live", 1]);
  vi.advanceTimersByTime(2000);
  expect([run.connection.value, hub.following]).toEqual(["over", 0]);

  const [ending, last] = await opened();
  ending.over = true;
  ending.say("status", ending.about());
  ending.say("end", { why: "" });
  ending.follower?.connection("ended");
  vi.advanceTimersByTime(5000);
  expect(last.connection.value).toBe("ended");
});

test("any request detects an expired session, and a sign-in resumes", async () => {
  const [hub, run] = await opened();
  hub.trouble = "refused";
  await expect(run.get("ranks")).rejects.toThrow("no");
  expect([run.connection.value, known(run).length, run.trouble.value]).toEqual(["refused", 5, null]);
  hub.trouble = null;
  hub.last = 9;
  await run.open();
  expect([run.connection.value, known(run).length, hub.following]).toEqual(["live", 10, 1]);
});

test("an unreachable hub is a failure at first, later a lost connection", async () => {
  const dead = new Hub();
  dead.trouble = "unreachable";
  const [, never] = await opened(dead);
  expect(never.trouble.value?.trouble).toBe("unreachable");

  const past = new Hub();
  past.over = true;
  const [, run] = await opened(past);
  past.trouble = "unreachable";
  await expect(run.get("heat")).rejects.toThrow();
  expect([past.following, run.trouble.value, known(run).length]).toEqual([1, null, 5]);
  run.close();
  expect(past.following).toBe(0);
});

test.each([-3_600_000, 3_600_000])("changing the wall clock by %i ms has no effect", async (setMs) => {
  const hub = new Hub();
  const [, run] = await opened(hub);
  hub.say("heartbeat", { wall_ns: 5_000_000_000 * 1e6 });
  const toldMs = run.now();
  const real = Date.now;
  vi.spyOn(Date, "now").mockImplementation(() => real() + setMs);
  expect(toldMs).toBeGreaterThanOrEqual(5_000_000_000);
  expect(run.now()).toBeGreaterThanOrEqual(toldMs);
  expect(run.now() - toldMs).toBeLessThan(60_000);
  vi.restoreAllMocks();
});

test("a missing run is requested once", async () => {
  const hub = new Hub();
  hub.trouble = "missing";
  const [, run] = await opened(hub);
  expect([hub.asked, run.trouble.value?.trouble]).toEqual([1, "missing"]);
});

test("data not loaded before the hub shut down refers to the report", async () => {
  const past = new Hub();
  past.about = () => ({ over: true, leaving: true, status: "finished" });
  const [, run] = await opened(past);
  expect(run.connection.value).toBe("ended");
  past.trouble = "unreachable";
  await expect(run.get("samples")).rejects.toThrow("report.html");
});
