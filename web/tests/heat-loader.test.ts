import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Params } from "../src/api/source";
import { Failure } from "../src/api/source";
import { HeatLoader, type Seen } from "../src/charts/heat-loader";
import type { HeatWindow } from "../src/charts/heat-window";
import { heatOf } from "./heat-made";

const PIXELS = { width: 400, height: 100 };
const value = (rank: number, step: number): number => 1000 * rank + step;

/** A fake hub with this many ranks; records its requests. */
class Hub {
  asked: Params[] = [];
  newest = 99;
  fails = false;

  heat = (_run: string, params: Params, signal?: AbortSignal) => {
    this.asked.push(params);
    if (this.fails) return Promise.reject(new Failure("unreachable", "no"));
    const [rank0 = 0, rank1 = 0] = String(params["ranks"]).split("-").map(Number);
    const window = { step0: Number(params["first"]), step1: Math.min(this.newest, Number(params["last"])) + 1, rank0, rank1: rank1 + 1 };
    const span = (from: number, to: number, bins: unknown): number => Math.ceil((to - from) / Number(bins));
    const made = heatOf(window, span(window.rank0, window.rank1, params["rank_bins"]), span(window.step0, window.step1, params["step_bins"]), value);
    return new Promise<typeof made>((resolve, reject) => {
      signal?.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
      setTimeout(() => resolve(made), 20);
    });
  };
}

function seen(hub: Hub, window?: Partial<HeatWindow>): Seen {
  const all = { step0: 0, step1: hub.newest + 1, rank0: 0, rank1: 50 };
  return { all, window: { ...all, ...window }, pixels: PIXELS };
}

let hub: Hub;
let loader: HeatLoader;
beforeEach(() => {
  vi.useFakeTimers();
  hub = new Hub();
  loader = new HeatLoader(hub, "night", "work", "max", () => undefined);
});
afterEach(() => {
  loader.close();
  vi.useRealTimers();
});

test("the whole map is requested once, then nothing while it stays visible", async () => {
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  expect(hub.asked).toEqual([{ value: "work", stat: "max", first: 0, last: 99, ranks: "0-49", rank_bins: 50, step_bins: 100 }]);
  for (let turn = 0; turn < 20; turn += 1) loader.look(seen(hub, { step0: turn, step1: 40 + turn }));
  await vi.advanceTimersByTimeAsync(5000);
  expect(hub.asked).toHaveLength(1);
  expect(loader.settled()).toBe(true);
});

test("requests are delayed during movement, up to a limit, and only the last is used", async () => {
  hub.newest = 99_999;
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  for (let at = 0; at < 60; at += 1) {
    loader.look(seen(hub, { step0: 1000 + at * 500, step1: 3000 + at * 500 }));
    await vi.advanceTimersByTimeAsync(16);
  }
  const during = hub.asked.length;
  expect(during).toBeGreaterThan(1);
  expect(during).toBeLessThan(8);
  await vi.advanceTimersByTimeAsync(500);
  expect(loader.settled()).toBe(true);
  expect(loader.best()?.window.step0).toBeLessThanOrEqual(1000 + 59 * 500);
});

test("an answer that covers the visible part settles the map", async () => {
  hub.newest = 99_999;
  const told: boolean[] = [];
  loader.close();
  loader = new HeatLoader(hub, "night", "work", "max", () => told.push(loader.settled()));
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  loader.look(seen(hub, { step0: 10_000, step1: 20_000 }));
  await vi.advanceTimersByTimeAsync(80); // asked, and not yet answered
  loader.look(seen(hub, { step0: 10_100, step1: 20_100 }));
  await vi.advanceTimersByTimeAsync(15);
  expect(told).toEqual([true, true]);
  await vi.advanceTimersByTimeAsync(500);
  expect(hub.asked).toHaveLength(2);
});

test("after zooming out, the whole map is requested again if its cells are narrower than a pixel", async () => {
  hub.newest = 99_999;
  loader.look(seen(hub, { step0: 10_000, step1: 90_000 })); // with what lies beyond the edges it is all
  await vi.advanceTimersByTimeAsync(500);
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(500);
  expect(hub.asked.map((params) => [params["first"], params["last"], params["step_bins"]])).toEqual([
    [0, 99_999, 500],
    [0, 99_999, 400],
  ]);
  expect(loader.settled()).toBe(true);
});

test("new steps are appended, and everything is requested again only if cells get too narrow", async () => {
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  for (; hub.newest < 399; hub.newest += 3) {
    loader.look(seen(hub));
    loader.newer();
    await vi.advanceTimersByTimeAsync(400);
  }
  expect(loader.counts.requested).toBe(1);
  const sizes = hub.asked.slice(1).map((params) => Number(params["step_bins"]));
  expect(Math.max(...sizes)).toBeLessThanOrEqual(12);
  expect(loader.best()?.heat.firstSteps.length).toBeGreaterThan(390);
  hub.newest = 420;
  loader.look(seen(hub));
  loader.newer();
  await vi.advanceTimersByTimeAsync(400);
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(400);
  expect(loader.counts.requested).toBe(2);
  expect(loader.best()?.stepSpan).toBe(2);
});

test("a map that grew is requested as a whole once a minute", async () => {
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  for (let second = 0; second < 130; second += 1) {
    hub.newest += 1;
    loader.look(seen(hub));
    loader.newer();
    await vi.advanceTimersByTimeAsync(1000);
  }
  expect(loader.counts.requested).toBe(3);
  expect(loader.best()?.window.step1).toBe(hub.newest + 1);
});

test("recently used pieces are kept, within limits", async () => {
  hub.newest = 99_999;
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  for (let at = 0; at < 60; at += 1) {
    loader.look({ ...seen(hub, { step0: at * 1300, step1: at * 1300 + 1300 }), pixels: { width: 1300, height: 380 } });
    await vi.advanceTimersByTimeAsync(300);
  }
  const cells = loader.pieces().reduce((sum, piece) => sum + piece.heat.cells.length, 0);
  expect(cells).toBeLessThanOrEqual(4 << 20);
  expect(loader.whole?.window.step1).toBe(100_000);
});

test("a failed request is repeated after a delay, and the old data stays", async () => {
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(50);
  hub.fails = true;
  hub.newest = 99_999;
  loader.look(seen(hub));
  await vi.advanceTimersByTimeAsync(1000);
  loader.look(seen(hub));
  expect(hub.asked).toHaveLength(2);
  expect(loader.failure?.trouble).toBe("unreachable");
  expect(loader.pieces()).toHaveLength(1);
  hub.fails = false;
  await vi.advanceTimersByTimeAsync(2000);
  expect(loader.failure).toBeNull();
  expect(loader.best()?.window.step1).toBe(100_000);
});

test("an empty map is not requested repeatedly", async () => {
  hub.newest = -1;
  const empty = { all: { step0: 0, step1: 1, rank0: 0, rank1: 2 }, window: { step0: 0, step1: 1, rank0: 0, rank1: 2 }, pixels: PIXELS };
  for (let turn = 0; turn < 10; turn += 1) {
    loader.look(empty);
    await vi.advanceTimersByTimeAsync(100);
  }
  expect(hub.asked).toHaveLength(1);
});
