import { expect, test } from "vitest";
import { captureLink, readRoute, traceLink, writeRoute } from "../src/address";
import type { CaptureRecord } from "../src/api/capture-documents";
import type { ReportDocument } from "../src/api/report-document";
import { Failure, type Params, type Source } from "../src/api/source";
import { EmbeddedTrace, HubTrace } from "../src/api/trace-data";
import { ranksIn } from "../src/panels/capture-form";
import { NO_PLACE, placeIn } from "../src/run/trace-place";
import { captureCost, capturedSteps, isOver, stateText, whyCaptured } from "../src/words/captures";

const PART = { form: "list", title: "a", items: [], more: "", view: "kernels" } as const;
const REPORT = {
  views: [["overview", "Overview", ""], ["kernels", "Kernels", "none"]],
  ranks: [0, 1, 2],
  rank: 1,
  pair: [1, 0],
  of_ranks: { 1: [PART] },
  pairs: { "1-0": [PART] },
} as unknown as ReportDocument;

test("links to traces and captures keep view, rank and peer", () => {
  for (const name of ["step-340", "a/b", "100%", "~job", "<img>"]) {
    for (const link of [captureLink("night", name), traceLink(name)]) {
      const route = { ...readRoute(link), view: "kernels", rank: 3, peer: 0 };
      expect(readRoute(writeRoute(route))).toEqual(route);
    }
    expect(readRoute(captureLink("night", name))).toMatchObject({ screen: "capture", runs: ["night"], capture: name });
  }
  expect(readRoute("#/run/night/capture")).toMatchObject({ screen: "list" });
});

test("a place that the report does not have becomes its first one", () => {
  expect(placeIn(REPORT, NO_PLACE)).toEqual({ view: "overview", rank: 1, peer: 0 });
  expect(placeIn(REPORT, { view: "nothing", rank: 9, peer: 9 })).toEqual({ view: "overview", rank: 1, peer: 0 });
  expect(placeIn(REPORT, { view: "kernels", rank: 2, peer: null })).toEqual({ view: "kernels", rank: 2, peer: 0 });
  expect(placeIn(REPORT, { view: "kernels", rank: 0, peer: 0 })).toEqual({ view: "kernels", rank: 0, peer: 1 });
});

test("a file has some ranks and says which", async () => {
  const data = new EmbeddedTrace(REPORT);
  expect(data.ranks).toEqual([1]);
  expect(data.note).toBe("This file has the details of 1 of 3 ranks. “stepscope serve” shows all of them.");
  expect(await data.rank(1)).toEqual([PART]);
  expect(await data.difference(1, 0)).toEqual([PART]);
  await expect(data.difference(0, 2)).rejects.toThrow("This file compares rank 1 with rank 0.");
});

test("a hub is asked once for a rank, and until it is made", async () => {
  const asked: [string, Params | undefined][] = [];
  const answers = [{ state: "reading", problem: null }, { parts: [PART] }, { state: "failed", problem: "damaged" }];
  const get = async (path: string, params?: Params): Promise<unknown> => {
    asked.push([path, params]);
    return answers[asked.length - 1];
  };
  const data = new HubTrace({ get } as unknown as Source, "traces/job", REPORT);
  const stop = new AbortController().signal;
  expect(await data.rank(1, stop)).toEqual([PART]);
  expect(asked).toEqual([]);
  expect(await data.rank(2, stop)).toEqual([PART]);
  expect(await data.rank(2, stop)).toEqual([PART]);
  expect(asked).toEqual([
    ["traces/job/ranks/2", {}],
    ["traces/job/ranks/2", {}],
  ]);
  await expect(data.timeline(0, stop)).rejects.toEqual(new Failure("fault", "damaged"));
  expect(asked.at(-1)).toEqual(["traces/job/timeline", { rank: 0 }]);
});

test("ranks are read as people write them", () => {
  expect(ranksIn("0, 3,4-6")).toEqual([0, 3, 4, 5, 6]);
  expect(ranksIn("7 7")).toEqual([7]);
  for (const text of ["", "a", "3-1", "-1", "0-9999999", "1.5"]) expect(ranksIn(text)).toBeNull();
});

const RECORD = {
  order: { id: "step-340", ranks: [0, 3], at_step: 340, steps: 6 },
  state: "ordered",
  reason: "finding",
  finding: "slow_rank",
  by: "",
  reports: [],
  figures: {},
} as unknown as CaptureRecord;

test("captures in words", () => {
  expect([capturedSteps(RECORD), stateText(RECORD), whyCaptured(RECORD), captureCost(RECORD)]).toEqual(["steps 340–345", "ordered: starts at step 340", "because of: slow rank", ""]);
  const report = { rank: 0, state: "delivered", problem: "", first_step: 341, last_step: 346, start_ms: 100, stop_ms: 200, write_ms: 700 } as const;
  const done: CaptureRecord = { ...RECORD, state: "done", reason: "request", by: "anna", reports: [report], figures: { step_ms: 41, usual_step_ms: 38.2 } };
  expect([capturedSteps(done), stateText(done), whyCaptured(done)]).toEqual(["steps 341–346", "done", "requested by anna"]);
  expect(captureCost(done)).toBe("step time 41.0 ms instead of 38.2 ms; 1.00 s to start, stop and write");
  expect([isOver(RECORD), isOver(done)]).toEqual([false, true]);
});
